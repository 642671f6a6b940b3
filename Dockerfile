# Tokenyard for the CPU, or by build argument for CUDA, as a user without rights.
#
#   docker build -t tokenyard .
#   docker build -t tokenyard:cuda --build-arg TORCH_INDEX=https://pypi.org/simple .
#   docker run --rm -p 30000:30000 tokenyard
#   docker run --rm -p 30000:30000 -v /models/Qwen3-0.6B:/model:ro tokenyard /model
#   docker run --rm -p 30000:30000 --gpus all -v /models/Qwen3-8B:/model:ro tokenyard:cuda /model
#   docker run --rm --gpus all --entrypoint python tokenyard:cuda smoke_image.py
FROM python:3.12-slim AS build
WORKDIR /src
# This index has builds without CUDA, which are a tenth of the size. PyPI's build brings the CUDA libraries along, so that
# the image needs the driver of the host alone (the NVIDIA container toolkit).
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python -m venv /venv
COPY constraints.txt ./
RUN /venv/bin/pip install --no-cache-dir --index-url "$TORCH_INDEX" --extra-index-url https://pypi.org/simple -c constraints.txt torch safetensors
# The CPU's own kernels are built with the package; they need a compiler here, not in the image.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY tokenyard ./tokenyard
RUN /venv/bin/pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" -c constraints.txt '.[torch,gateway]'

FROM python:3.12-slim
# Triton compiles a small launcher at the first use of a GPU, so the image for CUDA needs a C compiler.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN case "$TORCH_INDEX" in */cpu) ;; *) apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* ;; esac
RUN useradd --create-home --uid 10001 tokenyard
COPY --from=build /venv /venv
USER tokenyard
WORKDIR /home/tokenyard
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 TOKENYARD_HOST=0.0.0.0 TOKENYARD_PORT=30000
# What the image can be seen to lack without a device: kernels, a compiler for Triton, an answer.
COPY tools/smoke_image.py ./
RUN python smoke_image.py
EXPOSE 30000
# /health is 200 from the first second on, also while a model loads; /ready says when requests are welcome.
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s --retries=3 \
    CMD ["python", "-c", "import http.client, os; c = http.client.HTTPConnection('127.0.0.1', int(os.environ['TOKENYARD_PORT']), timeout=2); c.request('GET', '/health'); exit(c.getresponse().status != 200)"]
# The probe asks TOKENYARD_PORT, so change the port by that and not by --port; it goes past any proxy.
# SIGTERM drains; give `docker stop` more time than --shutdown-timeout: docker stop -t 40.
STOPSIGNAL SIGTERM
ENTRYPOINT ["tokenyard", "serve"]
