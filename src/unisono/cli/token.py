"""`unisono token`: make the secret that the hosts of a job share."""

from __future__ import annotations

from pathlib import Path

import click

from unisono.errors import LaunchError

__all__ = ["token"]


@click.command(short_help="Make the secret that the machines of a job share.")
@click.argument("file", type=click.Path(path_type=Path))
def token(file: Path) -> int:
    """Write a new secret into FILE, for unisono run --rdzv-token-file.

    Only you can read the file. Copy it to all machines of the job, for example with scp.
    """
    from unisono.launch.hosts.shared_token import make_token  # noqa: PLC0415  other commands do not need it

    try:
        make_token(file)
    except FileExistsError:
        raise LaunchError(f"{file} exists already; give another name, or remove it") from None
    except OSError as error:
        raise LaunchError(f"{file} cannot be written: {error.strerror}") from error
    click.echo(
        f"{file} holds a new token; copy it to all machines, and give it to unisono run --rdzv-token-file {file}"
    )
    return 0
