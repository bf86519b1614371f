"""The command as a user calls it: what it prints, writes and refuses."""

import io
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from radix_rope.cli import main

DOCUMENT = "".join(f"Line {i}: the keeper of lamp {i * 37} is number {i * i}.\n" for i in range(9))
HOSTILE = "<script>alert('x')</script>&amp;\x1b[31m[bold]"
ESCAPE = "\x1b"


@pytest.fixture
def asked(byte_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A prompt whose document stands 2 tokens (bytes) further on than in its donor."""
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE", "RADIX_ROPE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    Path("A.txt").write_text("Be brief.12" + DOCUMENT)
    Path("B.txt").write_text("Be long.")
    Path("P.txt").write_text("Be brief." + HOSTILE[:4] + DOCUMENT + HOSTILE)
    return [
        "explain", "--model-path", str(byte_folder),
        "--donors", "A.txt", "--donors", "B.txt", "--prompt", "P.txt",
    ]  # fmt: skip


def table(out: str) -> list[list[str]]:
    """Rows of the table of parts, split at blanks."""
    return [line.split() for line in out.splitlines() if re.match(r" +\d+  \w+ +\d", line)]


def test_a_moved_document_in_a_pipe(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(asked) == 0
    out, length = capsys.readouterr().out, len(DOCUMENT)
    assert ESCAPE not in out
    assert table(out) == [
        ["1", "exact", "0", "9", "9", "A.txt", "0", "+0"],
        ["2", "computed", "9", "13", "4"],
        ["3", "recomputed", "13", "29", "16", "A.txt", "11", "+2", "0"],
        ["4", "reused", "29", str(13 + length), str(length - 16), "A.txt", "27", "+2", "0"],
        ["5", "computed", str(13 + length), str(13 + length + len(HOSTILE)), str(len(HOSTILE))],
    ]
    assert out.startswith(
        "[1 exact from A.txt]Be brief.[2 computed]<scr[3 recomputed from A.txt +2]" + DOCUMENT[:16]
    )
    assert "[5 computed]<script>alert('x')</script>&amp;\\x1b[31m[bold]\n" in out
    total = 13 + length + len(HOSTILE)
    assert re.search(rf"^reused +{length - 16} +{100 * (length - 16) / total:.1f}%", out, re.M)
    assert re.search(rf"^prompt +{total}\s*$", out, re.M)
    assert "It takes 2 rows of the forward." in out


def test_colours_on_a_terminal_only(
    asked: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(asked) == 0
    coloured = capsys.readouterr().out
    assert f"{ESCAPE}[30;42mBe brief.{ESCAPE}[0m" in coloured  # black on green
    assert f"{ESCAPE}[30;43m{DOCUMENT[:16]}{ESCAPE}[0m" in coloured
    assert f"{ESCAPE}[30;46m{DOCUMENT[16:40]}" in coloured
    # The prompt's own escape is not among them.
    assert f"{ESCAPE}[31m" not in coloured and "\\x1b[31m" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(asked) == 0
    assert ESCAPE not in capsys.readouterr().out


def test_what_a_terminal_cannot_encode_is_spelled_out(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("P.txt").write_text("日本 Be brief.", encoding="utf-8")
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main(asked) == 0
    sys.stdout.flush()
    assert raw.getvalue().startswith(b"[1 computed]\\u65e5\\u672c Be brief.\n")


def test_the_table_alone(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*asked, "--no-text"]) == 0
    out = capsys.readouterr().out
    assert "Be brief." not in out and "keeper" not in out
    assert len(table(out)) == 5


class Page(HTMLParser):
    """Tags, titles and the text of the prompt."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.titles: list[str] = []
        self.prompt = ""
        self._inside = self._number = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        if "title" in given:
            self.titles.append(given["title"] or "")
        self._inside |= given.get("class") == "prompt"
        self._number = tag == "b"

    def handle_endtag(self, tag: str) -> None:
        self._number = False
        self._inside &= tag != "div"

    def handle_data(self, data: str) -> None:
        if self._inside and not self._number:
            self.prompt += data


def test_html_is_one_page_that_hostile_text_cannot_leave(
    asked: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    donor = tmp_path / '"><img src=x>.txt'
    Path("A.txt").rename(donor)
    asked[asked.index("A.txt")] = donor.name
    assert main([*asked, "--html", "P.html"]) == 0
    html = Path("P.html").read_text(encoding="utf-8")
    page = Page(html)
    assert set(page.tags) <= {
        "html", "head", "meta", "title", "style", "body", "h1", "table", "tr", "th", "td", "span",
        "div", "b", "a", "p",
    }  # fmt: skip
    assert page.prompt == "Be brief.<scr" + DOCUMENT + HOSTILE.replace(ESCAPE, "\\x1b")
    end = 13 + len(DOCUMENT)
    assert page.titles == [
        f"exact [0,9)<-[0,9) delta=+0 donor={donor.name}",
        "computed [9,13)",
        f"recomputed [13,29)<-[11,27) delta=+2 left_context_tokens=0 donor={donor.name}",
        f"reused [29,{end})<-[27,{end - 2}) delta=+2 left_context_tokens=0 donor={donor.name}",
        f"computed [{end},{end + len(HOSTILE)})",
    ]
    assert "default-src 'none'" in html and "http" not in html.replace("http-equiv", "")


def test_options_are_read_as_a_server_reads_them(
    asked: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RADIX_ROPE_CONFIG", '{"mode": "exact"}')
    assert main([*asked, "--no-text"]) == 0
    out = capsys.readouterr().out
    assert [row[1] for row in table(out)] == ["exact", "computed"]
    assert 'mode "exact"' in out
    attention = '{"repair": "attention", "attention_percent": 50}'
    assert main([*asked, "--no-text", "--radix-rope-config", attention]) == 0
    out = capsys.readouterr().out
    assert f"{-(-len(DOCUMENT) // 2)} (50%) are computed again in a second pass" in out
    assert main([*asked, "--no-text", "--page-size", "4"]) == 0
    assert table(capsys.readouterr().out)[0][:4] == ["1", "exact", "0", "8"]


def test_token_ids_instead_of_text(
    byte_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    donor, prompt = tmp_path / "A.json", tmp_path / "P.json"
    donor.write_text(str(list(range(100))))
    prompt.write_text(str([*range(50), 7]))
    files = ["--donors", str(donor), "--prompt", str(prompt), "--tokens", "--no-text"]
    assert main(["explain", "--model-path", str(byte_folder), *files]) == 0
    assert table(capsys.readouterr().out)[0][:4] == ["1", "exact", "0", "50"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--prompt", "missing.txt"], "missing.txt: cannot be read (No such file or directory)"),
        (["--donors", "empty.txt"], "empty.txt: the file is empty"),
        (["--prompt", "latin.txt"], "latin.txt: not UTF-8 (byte 3)"),
        (["--model-path", "nowhere"], "--model-path nowhere: there is no such folder"),
        (["--model-path", "."], "no tokenizer can be read"),
        (["--radix-rope-config", '{"stride": 1}'], "option 'stride' cannot be 1"),
        (["--radix-rope-config", "{"], "not valid JSON"),
        (["--radix-rope-config", ""], "not valid JSON"),
        (["--page-size", "0"], "--page-size 0: it must be at least 1"),
        (["--html", "nowhere/P.html"], "--html nowhere/P.html: cannot be written"),
    ],
)
def test_what_cannot_be_used_is_named(
    asked: list[str], capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    Path("empty.txt").touch()
    Path("latin.txt").write_bytes(b"caf\xe9")
    assert main([*asked, *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith("radix-rope explain: ") and said in error
    assert "Traceback" not in error


def test_no_engine_is_needed(asked: list[str]) -> None:
    blocked = ("sglang", "radix_rope.integration", "radix_rope.rotary")
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked}));"
        f"from radix_rope.cli import main; sys.exit(main({asked}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(table(done.stdout)) == 5


def test_donors_are_asked_for(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["explain", "--prompt", "P.txt"])
    assert stop.value.code == 2
    assert "--donors" in capsys.readouterr().err
