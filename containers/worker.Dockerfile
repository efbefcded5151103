# An image with one rollout worker: docker build -f containers/worker.Dockerfile -t echo2-worker .
#
# Nothing of a run is in it. What a worker needs of its run comes with the join string, from the environment.

ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
# What the worker can do besides driving a scripted engine; "torch" is the transformers engine.
ARG EXTRAS=torch
# Another index for torch alone, for a build of it without CUDA or for another CUDA; the usual one has CUDA on Linux.
ARG TORCH_INDEX_URL=
WORKDIR /source
RUN python -m venv /opt/echo2
COPY constraints.txt ./
# torch first and alone: it is most of the image, and its layer stays as it is when only our sources change.
RUN case ",${EXTRAS}," in *,torch,*) \
      /opt/echo2/bin/pip install --no-cache-dir -c constraints.txt ${TORCH_INDEX_URL:+--index-url "${TORCH_INDEX_URL}"} torch ;; \
    esac
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN /opt/echo2/bin/pip install --no-cache-dir -c constraints.txt ".${EXTRAS:+[${EXTRAS}]}"

FROM python:${PYTHON}-slim
RUN useradd --uid 10001 --create-home echo2 \
 && mkdir /state \
 && chown echo2:echo2 /state
COPY --from=build /opt/echo2 /opt/echo2
ENV PATH=/opt/echo2/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    OMP_WAIT_POLICY=PASSIVE
USER echo2
# Credential, spool and snapshots lie in echo2-worker/NAME below the working folder.
WORKDIR /state
VOLUME /state
# It drains: finishes what it generates, submits, leaves.
STOPSIGNAL SIGTERM
ENTRYPOINT ["echo2", "worker"]
