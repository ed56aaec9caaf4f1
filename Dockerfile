# shardnet in a container: `docker build -t shardnet .`; docs/usage.md says how it is run.
# With an NVIDIA GPU: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/shardnet
WORKDIR /build
# torch comes first: it is most of the image and changes least.
COPY constraints.txt ./
RUN /opt/shardnet/bin/pip install --no-cache-dir --index-url ${TORCH_INDEX} -c constraints.txt torch
COPY pyproject.toml setup.py README.md LICENSE ./
COPY shardnet ./shardnet
COPY cli ./cli
RUN /opt/shardnet/bin/pip install --no-cache-dir -c constraints.txt . \
    && find /opt/shardnet -path "*/shardnet/model/kernels/*.so" | grep -q .

FROM python:${PYTHON}-slim
RUN useradd --uid 1000 --create-home shardnet \
    && install --directory --owner=shardnet --mode=700 \
        /home/shardnet/.cache /home/shardnet/.config /home/shardnet/.config/shardnet
COPY --from=build /opt/shardnet /opt/shardnet
ENV PATH=/opt/shardnet/bin:$PATH
USER shardnet
WORKDIR /home/shardnet
# Models and weights of other nodes; the cluster key and the configuration.
VOLUME ["/home/shardnet/.cache", "/home/shardnet/.config/shardnet"]
EXPOSE 7433 8000
STOPSIGNAL SIGTERM
ENTRYPOINT ["shardnet"]
CMD ["node"]
