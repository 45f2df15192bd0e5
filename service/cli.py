"""The command line: every entry point of the service, and its errors in plain words.

The rule: a mistake of the operator's is answered by sentences on stderr and an exit code (1: cannot
start; 2: settings), never by a traceback, and no value of a setting is ever shown. Commands import
what they need when they run, so that `hookledger --help` is quick.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.errors import StartError

if TYPE_CHECKING:
    from pydantic import ValidationError

    from service.settings import Settings

app = typer.Typer(
    name="hookledger",
    help="A webhook sender whose ledger is the truth.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help, in a third of the time
)
keys = typer.Typer(help="API keys, and the keyring that encrypts signing secrets.", no_args_is_help=True)
app.add_typer(keys, name="keys")


def main() -> None:
    """The program `hookledger`."""
    try:
        app()
    except StartError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _folder(text: str | Path) -> Path:
    """A folder's name. An empty one, from a variable that is not set, would be the current folder."""
    if not str(text):
        raise typer.BadParameter("the folder's name is empty")
    return Path(text)


@app.command()
def dev(
    port: Annotated[
        int | None,
        typer.Option(
            envvar="API_PORT", min=0, max=65535, help="The API's port.", show_default="8080, or the next one free"
        ),
    ] = None,
    data_dir: Annotated[
        Path, typer.Option(help="Where the embedded servers and secrets are kept.", parser=_folder, metavar="FOLDER")
    ] = Path(".hookledger"),
    ready_file: Annotated[
        Path | None, typer.Option(help="A JSON file to write once everything answers, and to keep current.")
    ] = None,
) -> None:
    """Run everything on this machine: embedded Postgres and Redis, API, worker and dispatcher.

    DATABASE_URL and REDIS_URL, when set, name servers to use in place of the embedded ones.
    """
    from service import dev as story

    raise typer.Exit(story.run(story.Options(port, data_dir, ready_file), dict(os.environ)))


@app.command()
def up(
    api: Annotated[int, typer.Option(min=0, max=64, help="API processes, on one shared port.")] = 1,
    workers: Annotated[int, typer.Option(min=0, max=64, help="Worker processes.")] = 1,
    dispatchers: Annotated[int, typer.Option(min=0, max=64, help="Dispatcher processes.")] = 1,
) -> None:
    """Run all roles on this machine against the servers in DATABASE_URL and REDIS_URL, and keep them running."""
    from service import up as story

    settings = load_settings()
    counts = story.Counts(api, workers, dispatchers)
    raise typer.Exit(story.run(counts, dict(os.environ), settings))


@app.command()
def api() -> None:
    """Run the HTTP API."""
    settings = load_settings()
    from service.api.app import serve

    serve(settings)


@app.command()
def worker() -> None:
    """Run a worker: it makes the attempts."""
    settings = load_settings()
    from service.worker import run

    run(settings)


@app.command()
def dispatcher() -> None:
    """Run a dispatcher: it hints what is due and rescues what was lost."""
    settings = load_settings()
    from service.dispatcher import run

    run(settings)


@app.command()
def migrate() -> None:
    """Bring the database to this version's schema."""
    settings = load_settings()
    from service.ledger.migrate import upgrade

    upgrade(settings)


@app.command()
def doctor() -> None:
    """Check settings, database and Redis; one line each."""
    settings = load_settings()
    from service.bootstrap import doctor as examine

    findings = [("settings", True, "complete and consistent"), *examine(settings)]
    for name, good, sentence in findings:
        typer.echo(f"{'ok ' if good else 'BAD'}  {name:<10} {sentence}")
    if not all(good for _, good, _ in findings):
        raise typer.Exit(1)


@app.command()
def openapi() -> None:
    """Print the API's OpenAPI document."""
    import json

    from service.api.app import openapi_document

    typer.echo(json.dumps(openapi_document(), indent=2, ensure_ascii=False))


@app.command()
def listen(
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on.")] = 9000,
    secret: Annotated[
        str | None,
        typer.Option(help="The secret, whsec_…, or public key, whpk_…: check each signature.", envvar="WEBHOOK_SECRET"),
    ] = None,
    answer: Annotated[
        str, typer.Option(help="What to answer: 200, 503, 429:retry-after=5, hang, reset; several in turn by commas.")
    ] = "200",
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
) -> None:
    """Run a demo receiver that checks signatures and prints what arrives."""
    from service.listen import run

    raise typer.Exit(run(port, secret, answer, host))


@keys.command("create")
def create_key(
    name: Annotated[str, typer.Argument(help="What the key is for; shown in lists and the audit log.")],
) -> None:
    """Make an API key and print it. It is shown this once and kept only as a hash."""
    settings = load_settings()
    from service.keys import create

    typer.echo(create(settings, name))


@keys.command("list")
def list_keys() -> None:
    """List the API keys, without their secrets."""
    settings = load_settings()
    from service.domain.ids import Prefix, to_typeid
    from service.keys import list_keys as all_keys

    for key in all_keys(settings):
        state = "alive" if key.revoked_at is None else f"revoked {key.revoked_at:%Y-%m-%d}"
        typer.echo(f"{to_typeid(Prefix.KEY, key.id)}  {key.created_at:%Y-%m-%d}  {state:<18}  {key.name}")


@keys.command("revoke")
def revoke_key(key_id: Annotated[str, typer.Argument(help="The key's id, as `keys list` shows it.")]) -> None:
    """Make an API key useless from now on."""
    settings = load_settings()
    from service.keys import revoke

    if not revoke(settings, key_id):
        raise StartError("There is no such key, or it was revoked before.")


@keys.command("keyring")
def keyring() -> None:
    """Print a new keyring for SECRET_KEYS. Keep it: without it the signing secrets in the ledger are lost."""
    from service.dev import make_keyring

    typer.echo(make_keyring())


def load_settings() -> Settings:
    """The settings of this process, or a sentence for each that is wrong, and exit code 2."""
    from pydantic import ValidationError

    from service.settings import Settings

    given: dict[str, Any] = {}  # nothing: all of it comes from the environment
    try:
        return Settings(**given)
    except ValidationError as error:
        for sentence in settings_sentences(error):
            print(sentence, file=sys.stderr)
        raise typer.Exit(2) from None


def settings_sentences(error: ValidationError) -> list[str]:
    """What is wrong with each environment variable, without its value."""
    return [
        _sentence(".".join(str(part) for part in each["loc"]).upper(), each["type"], each["msg"])
        for each in error.errors(include_url=False, include_context=False, include_input=False)
    ]


def _sentence(variable: str, kind: str, message: str) -> str:
    if kind == "missing":
        return f"{variable} is not set."
    words = re.sub(r"^Value error, ", "", message)
    words = re.sub(r"^(Input|String|Value) should ", "must ", words)
    if not variable:
        return f"{words}."  # a relation names its variables itself
    return f"{variable} {words}." if words.startswith("must ") else f"{variable}: {words}."


if __name__ == "__main__":
    main()
