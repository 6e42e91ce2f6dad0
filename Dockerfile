# lossd in a container.
#
#   docker build -t lossd .                                             CPU
#   docker build -t lossd:cuda \
#     --build-arg BUILD_BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 \
#     --build-arg RUNTIME_BASE=nvidia/cuda:13.0.1-runtime-ubuntu24.04 .  GPU
#   docker run --rm -p 127.0.0.1:7070:7070 -p 127.0.0.1:7071:7071 -v lossd:/var/lib/lossd lossd
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
# Inside the container all interfaces are its own; publish the ports to loopback or a trusted network only.
CMD ["--allow_non_loopback", "--listen=0.0.0.0:7070", "--http=0.0.0.0:7071", "--checkpoint_dir=/var/lib/lossd"]
