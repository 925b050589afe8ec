# syntax=docker/dockerfile:1
# The draft service: an EAGLE-3 head, which grows trees of likely tokens.
#   docker build -f deploy/docker/draft.Dockerfile -t canopy-draft:0.1.0 .
# BASE: pin it by digest, as docker.io/library/python@sha256:...; both stages must have one Python.
ARG BASE=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE} AS build
ARG ACCELERATOR=cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY deploy/docker/*.lock locks/
# Every file that comes from outside has its hash in the list; nothing is built from source.
RUN python -m venv /opt/canopy \
 && /opt/canopy/bin/pip install --require-hashes --only-binary=:all: -r locks/engine.lock \
 && /opt/canopy/bin/pip install --require-hashes --only-binary=:all: -r locks/build.lock \
 && if [ "$ACCELERATOR" = tpu ]; then \
      /opt/canopy/bin/pip install --require-hashes --only-binary=:all: -r locks/tpu.lock; \
    fi
COPY . .
RUN /opt/canopy/bin/pip install --no-deps --no-build-isolation . \
 && /opt/canopy/bin/pip uninstall --yes setuptools pip

FROM ${BASE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="canopy-draft" \
      org.opencontainers.image.description="Canopy draft: an EAGLE-3 head, which grows trees of likely tokens" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/canopy /opt/canopy
ENV HOME=/tmp PATH=/opt/canopy/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
WORKDIR /opt/canopy
EXPOSE 50053 9090
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m", "draft_service"]
