"""The command `opgrad` in this process."""

from typer.testing import CliRunner

from opgrad.cli.app import app


def cli(*words, columns=200):
    """Exit status and everything printed; an exception that the command does not tell is raised."""
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": str(columns)})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output
