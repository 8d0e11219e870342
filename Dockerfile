# Two images from one file: `core` (gateway, tokenizer, scheduler, detokenizer; no torch) and
# `executor` (model preparation and execution).
#   BASE_IMAGE          any Linux with Python 3.11 or newer as python3, with venv
#   TORCH_INDEX         where torch comes from besides PyPI; empty: PyPI's, which is built for CUDA
#   EXECUTOR_PACKAGES   Debian packages of the executor; Triton compiles with gcc on a GPU
ARG BASE_IMAGE=python:3.11-slim

# What to install, out of pyproject.toml: only a change of these lists installs packages again.
FROM ${BASE_IMAGE} AS packages
COPY pyproject.toml ./
RUN python3 -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
extra = project["optional-dependencies"]; \
lists = {"core": project["dependencies"] + extra["otel"], "executor": extra["executor"]}; \
[print(*words, sep="\n", file=open(f"/{name}.txt", "w")) for name, words in lists.items()]'

FROM ${BASE_IMAGE} AS core-packages
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/venv/bin:$PATH
# The number is fixed: volumes and Kubernetes' runAsNonRoot know users by it.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp headrace \
    && install --directory --owner headrace --group headrace /models \
    && install --directory --owner headrace --group headrace --mode 0700 /keys
RUN python3 -m venv /venv
WORKDIR /app
COPY --from=packages /core.txt /
RUN pip install --requirement /core.txt

FROM core-packages AS core
COPY pyproject.toml README.md LICENSE ./
COPY shared shared
COPY kernels kernels
COPY services services
RUN pip install --no-deps .
USER 10001:10001
ENTRYPOINT ["headrace"]

FROM core-packages AS executor-packages
ARG EXECUTOR_PACKAGES=""
RUN if [ -n "$EXECUTOR_PACKAGES" ]; then apt-get update \
    && apt-get install --yes --no-install-recommends $EXECUTOR_PACKAGES \
    && rm -rf /var/lib/apt/lists/*; fi
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY --from=packages /executor.txt /
RUN pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} --requirement /executor.txt

FROM executor-packages AS executor
COPY pyproject.toml README.md LICENSE ./
COPY shared shared
COPY kernels kernels
COPY services services
RUN pip install --no-deps .
USER 10001:10001
ENTRYPOINT ["headrace"]
