# One image for every role; compose.yaml and the chart in deploy/helm set the role by the command.
# The base needs Python 3.11 or newer with venv, and either apt or bubblewrap and libmagic.
ARG BASE_IMAGE=python:3.12.8-slim-bookworm@sha256:2199a62885a12290dc9c5be3ca0681d367576ab7bf037da120e564723292a2f0

FROM ${BASE_IMAGE} AS build
# To build without a package index: `--no-index --find-links /wheels`, with the wheels in deploy/wheels.
ARG PIP_ARGUMENTS=""
WORKDIR /src
COPY deploy/wheels /wheels
RUN python3 -m venv /opt/nekro
# All packages, including the build backend, are checked by hash; then the project itself, which has no hash.
COPY deploy/requirements.txt /src/requirements.txt
RUN /opt/nekro/bin/pip install --no-cache-dir --disable-pip-version-check ${PIP_ARGUMENTS} \
    --require-hashes -r requirements.txt
COPY pyproject.toml README.md LICENSE ./
COPY nekro_agent nekro_agent
COPY broker_config broker_config
COPY storage storage
COPY workers workers
COPY plugin_pkgs plugin_pkgs
COPY nekro_client nekro_client
COPY nekro nekro
COPY examples/demo examples/demo
RUN /opt/nekro/bin/pip install --no-cache-dir --disable-pip-version-check \
    --no-index --no-deps --no-build-isolation .
# The packages that sandboxed code can import; a volume at NEKRO_SANDBOX__PACKAGES_DIR replaces them.
RUN /opt/nekro/bin/nekro --data-dir /tmp/nekro sandbox packages build \
    --pip-arguments="--no-cache-dir ${PIP_ARGUMENTS}"

FROM ${BASE_IMAGE}
# libmagic1 is for the package python-magic, which plugins import.
RUN { command -v bwrap && ldconfig -p | grep -q 'libmagic\.so\.1'; } >/dev/null || { \
        apt-get update \
        && apt-get install -y --no-install-recommends bubblewrap libmagic1 \
        && rm -rf /var/lib/apt/lists/*; }
# A fixed user id, as volumes and shared file systems store it.
RUN groupadd --gid 10001 nekro \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /data --shell /usr/sbin/nologin nekro \
    && install -d -o 10001 -g 10001 -m 0750 /data
COPY --from=build /opt/nekro /opt/nekro
# The entrypoint of lane rounds where the container has a writable control group.
COPY deploy/nekro-delegate /usr/local/bin/nekro-delegate
ENV PATH=/opt/nekro/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    NEKRO_DATA_DIR=/data
USER 10001:10001
WORKDIR /data
VOLUME /data
ENTRYPOINT ["nekro"]
CMD ["doctor"]
