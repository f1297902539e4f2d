"""Options and errors that all commands share."""

from __future__ import annotations

import inspect
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import click
import pytest
import typer

import multihead
from cli.commands import call, run
from multihead import __version__, cli
from multihead.cli.options import check_outputs
from multihead.errors import MultiheadError


def commands() -> dict[str, click.Command]:
    """Every command by its full name."""
    found: dict[str, Any] = {}
    todo = [("", typer.main.get_command(cli.app))]
    while todo:
        name, command = todo.pop()
        inner = getattr(command, "commands", {})
        todo += [(f"{name} {key}".strip(), value) for key, value in inner.items()]
        if not inner:
            found[name] = command
    return found


COMMANDS = commands()


def options(command: click.Command) -> list[Any]:
    return [p for p in command.params if p.param_type_name == "option" and p.name != "help"]


def test_the_commands() -> None:
    assert set(COMMANDS) == {
        *("read", "statistics", "table show", "table merge", "table compare"),
        *("prune", "share", "tune", "curve", "evaluate", "cost", "check", "warm"),
    }


def test_an_option_means_one_thing_in_every_command() -> None:
    """The same name, the same help, but for a few whose values differ."""
    texts: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, command in COMMANDS.items():
        for option in options(command):
            for spelling in option.opts:
                texts[spelling][str(option.help)].append(name)
    differing = {spelling for spelling, helps in texts.items() if len(helps) > 1}
    # The same thing with a remark for the command: which table --json holds, what is drawn, ...
    assert differing <= {
        "--json",
        "--plot",
        "--dtype",
        "--text",
        "--num-heads",
        "--num-kv-heads",
        "--context",
        "--page",
    }


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_begins_with_a_noun_or_a_verb(name: str) -> None:
    command = COMMANDS[name]
    for text in [command.help, *(option.help for option in options(command))]:
        assert text and re.match(r"[A-Z0-9]", text) and text.rstrip().endswith((".", ").")), text
        assert not re.match(r"(Of|What|Which|With|For|Whose|That|Whether) ", text) or (
            text.startswith(("Whether", "Which"))
        ), text


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_can_show_a_traceback(name: str) -> None:
    assert any("--debug" in option.opts for option in options(COMMANDS[name]))


def test_commands_that_open_a_model_share_their_options() -> None:
    for name in ("read", "prune", "share", "tune", "curve", "evaluate"):
        spellings = [option.opts[-1] for option in options(COMMANDS[name])]
        assert spellings[-4:] == ["--device", "--dtype", "--trust-remote-code", "--debug"], name


def test_prune_has_few_options() -> None:
    assert len(options(COMMANDS["prune"])) <= 20


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"multihead {__version__}\n")


def test_completion_can_be_installed() -> None:
    done = run("--help")
    assert "--install-completion" in done.stdout


def test_a_users_error_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MULTIHEAD_DEBUG", raising=False)
    for arguments in (["table", "show", tmp_path / "none.json"], ["check", "none.py:x"]):
        code, out, err = call(monkeypatch, capsys, *arguments)
        assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("multihead: ")


@pytest.mark.parametrize("by_option", [True, False])
def test_debug_shows_the_traceback_of_a_users_error(
    monkeypatch: pytest.MonkeyPatch, by_option: bool
) -> None:
    monkeypatch.setenv("MULTIHEAD_DEBUG", "" if by_option else "1")
    done = run("table", "show", "none.json", *(["--debug"] if by_option else []))
    assert done.returncode == 1 and "Traceback" in done.stderr and "load_table" in done.stderr


@pytest.mark.parametrize("error", [KeyError("x"), ValueError("torch's"), TypeError("ours")])
def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    from multihead.checks import load

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(load, "load_target", fail)
    monkeypatch.setattr("sys.argv", ["multihead", "check", "a.py:x"])
    with pytest.raises(type(error)):
        cli.main()


def test_outputs_are_checked_before_any_work(tmp_path: Path) -> None:
    for path, words in (
        (tmp_path / "a.txt", r"--plot .*a.txt: expected a name that ends in .png or .svg"),
        (tmp_path / "none" / "a.png", r"--plot .*the folder .*none.* doesn't exist"),
        (tmp_path, r"--plot .*is a folder"),
    ):
        with pytest.raises(MultiheadError, match=words):
            check_outputs(plot=(path, ".png .svg"))
    with pytest.raises(MultiheadError, match="is given twice"):
        check_outputs(json=(tmp_path / "a", ""), csv=(tmp_path / "a", ""))
    check_outputs(json=(None, ".json"), plot=(tmp_path / "a.svg", ".png .svg"))


def test_cli_has_options_and_calls_only() -> None:
    """Commands are short: what they do lies in the library."""
    for name in ("read", "table", "prune", "cost", "check"):
        module = getattr(cli, name)
        for attribute, value in vars(module).items():
            if attribute.endswith("_command"):
                body = inspect.getsource(value).partition('"""')[2]
                assert body.count("\n") <= 75, attribute


def test_notes_on_how_a_model_was_opened_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By every command that opens a model; what comes from its config is harmless."""
    model, tokenizer = multihead.load_builtin()
    folder, text = tmp_path / "model", tmp_path / "text.txt"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["_attn_implementation"] = config["attn_implementation"] = "someone/kernel\x1b[31m"
    (folder / "config.json").write_text(json.dumps(config))
    words = "The cat sat on the mat, and the dog sat on the cat. "
    text.write_text(words * 9)
    texts = ["--calibrate", text, "--tokens", 64]
    for arguments in (
        ["read", folder, "--prompt", "The cat"],
        ["prune", folder, "--remove", "1", "--compensate", "none", *texts],
        ["share", folder, "--num-kv-heads", "1", *texts],
        ["evaluate", folder, "--text", text, "--tokens", 64],
    ):
        code, out, err = call(monkeypatch, capsys, *arguments)
        assert code == 0, err
        assert "note: " in err and "asks for the attention 'someone/kernel" in err, arguments
        assert "\x1b" not in out + err
    code, _, err = call(monkeypatch, capsys, "read", "--prompt", "The cat")
    assert code == 0 and not err
