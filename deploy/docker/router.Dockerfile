# syntax=docker/dockerfile:1
# The router service: the public API, between clients, draft and verify.
#   docker build -f deploy/docker/router.Dockerfile -t canopy-router:0.1.0 .
# BASE: pin it by digest, as docker.io/library/python@sha256:...; both stages must have one Python.
ARG BASE=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY deploy/docker/*.lock locks/
# Every file that comes from outside has its hash in the list; nothing is built from source.
RUN python -m venv /opt/canopy \
 && /opt/canopy/bin/pip install --require-hashes --only-binary=:all: -r locks/router.lock \
 && /opt/canopy/bin/pip install --require-hashes --only-binary=:all: -r locks/build.lock
COPY . .
RUN /opt/canopy/bin/pip install --no-deps --no-build-isolation . \
 && /opt/canopy/bin/pip uninstall --yes setuptools pip

FROM ${BASE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="canopy-router" \
      org.opencontainers.image.description="Canopy router: the public API, between clients, draft and verify" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/canopy /opt/canopy
ENV HOME=/tmp PATH=/opt/canopy/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
WORKDIR /opt/canopy
EXPOSE 50051 9090
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m", "router"]
