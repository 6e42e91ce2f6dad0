# lossd in a container.
#
#   docker build --target cpu -t lossd .                               CPU
#   docker build --target cuda -t lossd:cuda .                         GPU
#   docker run --rm --network=host -v lossd:/var/lib/lossd lossd       on the host's loopback
#   docker run --rm -p 7070:7070 -v lossd:/var/lib/lossd -v /etc/lossd:/etc/lossd:ro lossd \
#     --checkpoint_dir=/var/lib/lossd --listen=0.0.0.0:7070 --tls_cert=/etc/lossd/server.pem \
#     --tls_key=/etc/lossd/server.key --tls_client_ca=/etc/lossd/ca.pem --role_file=/etc/lossd/roles
#                                                                      for other machines (docs/security.md)
#
# The server runs as user and group 7070 and writes to /var/lib/lossd alone: `docker run --read-only` works. The key must be readable by the
# user 7070 alone, or by the group 7070 if it belongs to root. The health check asks the HTTP port, which wants no certificate of
# its client; set LOSSD_PROBE to its address if --http is another, with https:// and LOSSD_CA if it has TLS.
#
# Libraries travel with the programs (scripts/bundle), so the images that run need no packages. They must not be older than those that
# build. scripts/check-image builds and tries the target cpu without Docker.

# What the file VERSION says, which a label cannot read; scripts/release and a test compare them.
ARG LOSSD_VERSION=0.1.0
ARG CPU_BUILD=docker.io/library/debian:12.12
ARG CPU_RUN=docker.io/library/debian:12.12-slim
ARG CUDA_BUILD=docker.io/nvidia/cuda:13.0.1-devel-ubuntu24.04
ARG CUDA_RUN=docker.io/nvidia/cuda:13.0.1-runtime-ubuntu24.04

FROM ${CPU_BUILD} AS cpu-build
WORKDIR /src
COPY scripts/install-deps scripts/install-deps
RUN scripts/install-deps build && rm -rf /var/lib/apt/lists/*
COPY . .
RUN scripts/image-programs cpu-only /opt/lossd

FROM ${CPU_RUN} AS cpu
COPY --from=cpu-build /opt/lossd /opt/lossd
RUN install --directory --owner=7070 --group=7070 --mode=0750 /var/lib/lossd
ENV PATH=/opt/lossd/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/var/lib/lossd
ARG LOSSD_VERSION
LABEL org.opencontainers.image.title="lossd" org.opencontainers.image.version="${LOSSD_VERSION}" org.opencontainers.image.licenses="Apache-2.0"
USER 7070:7070
WORKDIR /var/lib/lossd
VOLUME /var/lib/lossd
EXPOSE 7070 7071
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 CMD ["lossctl", "health", "--probe", "ready"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["lossd"]
# Loopback only, as everywhere: what other machines reach needs certificates or tokens, which an image has not.
CMD ["--checkpoint_dir=/var/lib/lossd"]

FROM ${CUDA_BUILD} AS cuda-build
WORKDIR /src
COPY scripts/install-deps scripts/install-deps
RUN scripts/install-deps build && rm -rf /var/lib/apt/lists/*
COPY . .
RUN scripts/image-programs release /opt/lossd

FROM ${CUDA_RUN} AS cuda
COPY --from=cuda-build /opt/lossd /opt/lossd
RUN install --directory --owner=7070 --group=7070 --mode=0750 /var/lib/lossd
ENV PATH=/opt/lossd/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/var/lib/lossd
ARG LOSSD_VERSION
LABEL org.opencontainers.image.title="lossd" org.opencontainers.image.version="${LOSSD_VERSION}" org.opencontainers.image.licenses="Apache-2.0"
USER 7070:7070
WORKDIR /var/lib/lossd
VOLUME /var/lib/lossd
EXPOSE 7070 7071
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 CMD ["lossctl", "health", "--probe", "ready"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["lossd"]
CMD ["--checkpoint_dir=/var/lib/lossd"]
