# For GPU nodes. The base image brings torch >= 2.10 with CUDA and NCCL, and Transformer Engine if it is to be used later:
#   docker build --build-arg BASE_IMAGE=<your PyTorch image> -t dppo_megatron .
# Not built or run by us yet: no GPU and no Docker engine where this was written.
ARG BASE_IMAGE
FROM ${BASE_IMAGE}

WORKDIR /opt/dppo_megatron
COPY pyproject.toml setup.py README.md LICENSE ./
COPY dppo_megatron dppo_megatron
COPY configs configs
COPY tools tools
# --no-deps for ourselves: the image's own torch stays
RUN pip install --no-cache-dir "megatron-core>=0.16.1,<0.17" "transformers>=5,<6" \
      "math-verify==0.9.0" "datasets>=4" "pyyaml>=6" safetensors tokenizers packaging psutil tqdm matplotlib \
      "aiohttp>=3.11" "msgspec>=0.19" "pyarrow>=18" "plotly>=6" "rich>=13" "argcomplete>=3.5" \
 && pip install --no-cache-dir --no-deps .

ENTRYPOINT ["dppo-megatron"]
