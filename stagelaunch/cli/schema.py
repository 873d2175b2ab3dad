"""``stagelaunch schema``: what an editor needs to check a deployment file while it is written."""

from __future__ import annotations

import json

import click

from stagelaunch.core.config import json_schema


@click.command()
def schema() -> None:
    """Print the JSON Schema (draft 2020-12) of deployment files."""
    click.echo(json.dumps(json_schema(), indent=2))
