"""The command `opgrad` in this process."""

from typer.testing import CliRunner

from opgrad.cli.app import app


def cli(*words, columns=200):
    """Exit status and everything printed; an exception that the command does not tell is raised."""
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": str(columns)})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def succeeds(*words, columns=200):
    """What the command prints, which has to succeed."""
    status, text = cli(*words, columns=columns)
    assert status == 0, text
    return text


def fails(*words, columns=200):
    """What the command prints, which has to fail and to say why in one line."""
    status, text = cli(*words, columns=columns)
    assert (status, text.count("\n"), text.count("opgrad: ")) == (1, 1, 1), text
    return text
