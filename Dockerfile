# lossd in a container.
#
#   docker build -t lossd .                                             CPU
#   docker build -t lossd:cuda \
#     --build-arg BUILD_BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 \
#     --build-arg RUNTIME_BASE=nvidia/cuda:13.0.1-runtime-ubuntu24.04 .  GPU
#   docker run --rm --network=host -v lossd:/var/lib/lossd lossd         on the host's loopback
#   docker run --rm -p 7070:7070 -v lossd:/var/lib/lossd -v /etc/lossd:/etc/lossd:ro lossd \
#     --checkpoint_dir=/var/lib/lossd --listen=0.0.0.0:7070 --tls_cert=/etc/lossd/server.pem \
#     --tls_key=/etc/lossd/server.key --tls_client_ca=/etc/lossd/ca.pem --role_file=/etc/lossd/roles
#                                                                        for other machines (docs/security.md)
# The key must be readable by the user 7070 alone, or by the group 7070 if it belongs to root. With tokens or
# certificates, give the HEALTHCHECK's lossctl a certificate in LOSSD_CA, LOSSD_CERT and LOSSD_KEY.
#
# The build takes CUDA if its compiler is in the image. Libraries travel with the programs (scripts/bundle), so the
# runtime image needs no packages; it must not be older than the build image.

ARG BUILD_BASE=debian:12
ARG RUNTIME_BASE=debian:12-slim

FROM ${BUILD_BASE} AS build
WORKDIR /src
COPY scripts/install-deps scripts/install-deps
RUN scripts/install-deps build && rm -rf /var/lib/apt/lists/*
COPY . .
RUN cmake --preset release -DLOSSD_TESTS=OFF -DLOSSD_BENCH=OFF -DLOSSD_EXAMPLES=OFF \
 && cmake --build --preset release --target lossd lossctl \
 && scripts/bundle build/release lossd lossctl \
 && mkdir /opt/lossd \
 && tar -C /opt/lossd --strip-components=1 -xzf dist/lossd-*.tar.gz

FROM ${RUNTIME_BASE}
RUN useradd --system --uid 7070 --home-dir /var/lib/lossd --create-home --shell /usr/sbin/nologin lossd
COPY --from=build /opt/lossd /opt/lossd
ENV PATH=/opt/lossd/bin:$PATH
USER lossd
WORKDIR /var/lib/lossd
VOLUME /var/lib/lossd
EXPOSE 7070 7071
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s --retries=3 \
  CMD ["lossctl", "--server=127.0.0.1:7070", "health"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["lossd"]
# Loopback only, as everywhere: what other machines reach needs certificates or tokens, which an image has not.
CMD ["--checkpoint_dir=/var/lib/lossd"]
