"""The workflows, the forms for issues and the hooks of GitHub and pre-commit.

zizmor reads the workflows as an attacker would. actionlint, which downloads a program
when it is installed, runs in the workflows alone; the tests here check the same basics.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
ZIZMOR = Path(sys.executable).parent / "zizmor"
CONTEXTS = {"env", "github", "matrix", "needs", "runner", "secrets", "steps"}
EXPRESSION = re.compile(r"\$\{\{\s*(\w+)[.\w-]*\s*\}\}")
PINNED = re.compile(r"[\w-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")


def read(path: Path) -> dict:
    # As text: YAML 1.1 takes the key `on` for a truth value.
    return yaml.load(path.read_text(), yaml.BaseLoader)


WORKFLOWS = {path.stem: read(path) for path in GITHUB.glob("workflows/*.yml")}


def zizmor(folder: Path) -> subprocess.CompletedProcess:
    command = [ZIZMOR, "--offline", "--no-progress", "--quiet", folder]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_zizmor_finds_nothing():
    result = zizmor(GITHUB)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("before", "after", "finding"),
    [
        ("pull_request:", "pull_request_target:", "dangerous-triggers"),
        ("run: .ci/run", "run: echo ${{ github.head_ref }}", "template-injection"),
    ],
)
def test_zizmor_finds_what_is_wrong(tmp_path, before, after, finding):
    shutil.copytree(GITHUB, tmp_path / ".github")
    workflow = tmp_path / ".github/workflows/tests.yml"
    workflow.write_text(workflow.read_text().replace(before, after))
    result = zizmor(tmp_path / ".github")
    assert result.returncode != 0
    assert finding in result.stdout


@pytest.mark.parametrize("name", WORKFLOWS)
def test_jobs_are_complete(name):
    workflow = WORKFLOWS[name]
    assert workflow.keys() >= {"name", "on", "permissions", "concurrency", "jobs"}
    for job in workflow["jobs"].values():
        assert job.keys() >= {"runs-on", "timeout-minutes", "permissions", "steps"}
        assert {job.get("needs")} - {None} <= workflow["jobs"].keys()
        assert all(("uses" in step) != ("run" in step) for step in job["steps"])
        for step in job["steps"]:
            script = step.get("run", "")
            command = ["bash", "-n", "-c", script]
            assert subprocess.run(command, check=False).returncode == 0, script
    text = (GITHUB / f"workflows/{name}.yml").read_text()
    assert text.count("${{") == len(EXPRESSION.findall(text))
    assert {*EXPRESSION.findall(text)} <= CONTEXTS
    uses = re.findall(r"uses: (.*)", text)
    assert all(PINNED.fullmatch(use) for use in uses), uses


def test_both_systems_run_everything():
    job = WORKFLOWS["tests"]["jobs"]["tests"]
    systems = job["strategy"]["matrix"]["system"]
    assert [name.partition("-")[0] for name in systems] == ["ubuntu", "macos"]
    scripts = "".join(step.get("run", "") for step in job["steps"])
    assert "doctor --verify" in scripts
    assert ".ci/run" in scripts
    assert (ROOT / ".ci/run").stat().st_mode & 0o100


def test_a_release_has_no_token():
    """PyPI trusts the workflow; only the job that publishes may say who it is."""
    build, publish = WORKFLOWS["release"]["jobs"].values()
    assert build["permissions"] == {"contents": "read"}
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["environment"]["name"] == "pypi"
    assert "secrets" not in (GITHUB / "workflows/release.yml").read_text()
    check = next(s["run"] for s in build["steps"] if "version" in s.get("name", ""))
    for tag, code in (("v" + version(), 0), ("v9.9.9", 1)):
        command = ["bash", "-c", check]
        result = subprocess.run(command, cwd=ROOT, env={"GITHUB_REF_NAME": tag})
        assert result.returncode == code


def version() -> str:
    text = (ROOT / "toolkit/lmx/version.py").read_text()
    return re.search('__version__ = "(.*)"', text)[1]


def test_forms_ask_for_what_a_fault_needs():
    forms = {path.stem: read(path) for path in (GITHUB / "ISSUE_TEMPLATE").iterdir()}
    assert forms.pop("config") == {"blank_issues_enabled": "false"}
    assert forms.keys() == {"fault", "idea"}
    for form in forms.values():
        assert form.keys() == {"name", "description", "labels", "body"}
        ids = [field["id"] for field in form["body"]]
        assert len({*ids}) == len(ids)
        for field in form["body"]:
            assert field["type"] == "textarea"
            assert field["attributes"]["label"]
    doctor = forms["fault"]["body"][-1]
    assert "lmx doctor --json" in doctor["attributes"]["label"]
    assert doctor["validations"] == {"required": "true"}


def test_hooks_are_programs_of_the_tests():
    hooks = read(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]
    assert [hook["id"] for hook in hooks] == ["ruff-check", "ruff-format", "zizmor"]
    for hook in hooks:
        program = hook["entry"].split()[0]
        assert (ZIZMOR.parent / program).exists()
        assert hook["language"] == "system"
