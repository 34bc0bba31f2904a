# Both programs with CUDA and NCCL. Untested: there was no container engine at hand when it was written.
#
#   docker build --build-arg COMMIT="$(git rev-parse --short=10 HEAD)" --tag rollcall .
#   docker run --rm --gpus all --volume "$PWD:/work" rollcall learner plan recipe.json
# The compiler needs no toolkit: everything of CUDA is opened at run time.
FROM rust:1.95-bookworm AS build
WORKDIR /source
COPY . .
# The version line names it; .git stays outside of the image.
ARG COMMIT=
RUN ROLLCALL_COMMIT=$COMMIT cargo build --release --locked --bins --features learner/nccl,actor/cuda

# The programs open the driver, NVRTC and NCCL at run time, and NVRTC reads the toolkit's headers.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
RUN apt-get update && apt-get install --yes --no-install-recommends ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /source/target/release/learner /source/target/release/actor /usr/local/bin/
WORKDIR /work
CMD ["learner", "--help"]
