# Two images from one file: `core` (gateway, tokenizer, scheduler, detokenizer; no torch) and
# `executor` (model preparation and execution).
ARG BASE=python:3.11-slim
FROM ${BASE} AS core
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1
WORKDIR /app
COPY pyproject.toml README.md LICENSE ./
COPY shared shared
COPY kernels kernels
COPY services services
RUN python3 -m venv /venv && /venv/bin/pip install .
ENV PATH=/venv/bin:$PATH
RUN useradd --create-home headrace && mkdir /models && chown headrace /models
USER headrace
ENTRYPOINT ["headrace"]

FROM core AS executor
USER root
RUN /venv/bin/pip install '.[executor]'
USER headrace
