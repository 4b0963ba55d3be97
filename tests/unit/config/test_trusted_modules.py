"""Which code a run folder may name. Modules are files here that nobody imports."""

import sys

import pytest

from rayagi.config.errors import ConfigError
from rayagi.config.files import load_config_file
from rayagi.config.spec import EnvSpec, NetworkSpec, RunSpec
from rayagi.config.trusted_modules import in_run_folder, module_files, refuse_untrusted_modules
from rayagi.envs.errors import EnvironmentOptionError


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The current folder, first on Python's path, with runs/a; beside it another folder on the path."""
    folder = tmp_path / "project"
    files = {
        folder: [
            "own.py", "package/__init__.py", "package/tasks.py", "space/tasks.py", "runs/a/evil.py",
            "runs/a/run.json", "runs/beside.py", "came/with.py", "came/net.py", "came/runs/b/run.json",
            "venv/lib/site-packages/installed.py",
        ],
        tmp_path / "elsewhere": ["foreign.py", "split/part.py"],
    }  # fmt: skip
    for base, names in files.items():
        for name in names:
            (base / name).parent.mkdir(parents=True, exist_ok=True)
            (base / name).write_text("raise AssertionError('imported')\n")
    (folder / "linked.py").symlink_to(tmp_path / "elsewhere" / "foreign.py")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(
        sys,
        "path",
        [str(folder), str(folder / "venv/lib/site-packages"), str(tmp_path / "elsewhere"), *sys.path],
    )
    return folder


def refuse(project, spec, run="runs/a"):
    refuse_untrusted_modules(spec, project / run / "config.yaml")


@pytest.mark.parametrize("module", ["own", "package.tasks", "package", "space.tasks"])
def test_modules_of_the_current_folder_are_the_projects(project, module):
    refuse(project, RunSpec(env=EnvSpec(id=f"{module}:Task-v0")))
    refuse(project, RunSpec(network=NetworkSpec(module=f"{module}:Net")))
    if module != "package":
        refuse(project, RunSpec(network=NetworkSpec(module=f"{module.replace('.', '/')}.py:Net")))


@pytest.mark.parametrize(
    "module",
    [
        "runs.a.evil",  # in the run folder, through packages without __init__.py
        "runs.beside",  # in the subfolder that the run is in
        "foreign",
        "split.part",
        "linked",
        "installed",
        "this",  # Python's own modules run code, too
        "sys",
        "not_there",
        "own.more",
        "a..b",
        "own.py",
    ],
)
def test_all_others_are_refused_without_an_import(project, module):
    for spec, setting in (
        (RunSpec(env=EnvSpec(id=f"{module}:Task-v0")), "env.id"),
        (RunSpec(network=NetworkSpec(module=f"{module}:Net")), "network.module"),
    ):
        if module == "own.py" and setting == "network.module":
            continue  # a file of the project
        with pytest.raises(ConfigError, match="not in the working project") as error:
            refuse(project, spec)
        assert f"module {module!r}" in str(error.value)
        assert str(project) in str(error.value)
        assert "--trust-modules" in str(error.value)
        assert error.value.path == setting
    assert not {"runs", "foreign", "split", "linked", "installed"} & set(sys.modules)


@pytest.mark.parametrize("file", ["runs/a/evil.py", "foreign.py", "../elsewhere/foreign.py", "none.py"])
def test_networks_files_outside_of_the_project_are_refused(project, file):
    for place in (file, str(project / file)):
        with pytest.raises(ConfigError, match="not in the working project"):
            refuse(project, RunSpec(network=NetworkSpec(module=f"{place}:Net")))


def test_what_came_in_one_folder_with_the_run_is_not_the_projects(project):
    spec = RunSpec(env=EnvSpec(id="came.with:Task-v0"))
    with pytest.raises(ConfigError, match=r"came/with\.py"):
        refuse(project, spec, "came/runs/b")
    refuse(project, spec)  # a run of another subfolder
    with pytest.raises(ConfigError, match=r"came/net\.py"):
        refuse(project, RunSpec(network=NetworkSpec(module="came/net.py:Net")), "came/runs/b")


def test_nothing_is_the_projects_in_a_run_folder(project, monkeypatch):
    monkeypatch.chdir(project / "runs/a")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    for module in ("evil", "own", "package.tasks"):
        with pytest.raises(ConfigError):
            refuse(project, RunSpec(env=EnvSpec(id=f"{module}:Task-v0")))
    assert in_run_folder(project / "runs/a")
    assert in_run_folder(project / "runs/a/checkpoints")
    assert not in_run_folder(project / "runs")


def test_an_interpreter_is_never_the_projects(project):
    spec = RunSpec(env=EnvSpec(id="isaacgym/Ant", kwargs={"python": str(project / "own.py")}))
    with pytest.raises(ConfigError, match="names the program, which is not in the working project"):
        refuse(project, spec)


def test_the_files_of_a_module_are_those_of_its_packages_too(project):
    assert module_files("package.tasks") == [project / "package/__init__.py", project / "package/tasks.py"]
    assert module_files("space.tasks") == [project / "space/tasks.py"]
    assert module_files("package.none") is None


def test_a_config_file_is_checked_if_it_is_of_a_run_folder(project):
    text = "env: {id: 'foreign:Task-v0'}\n"
    (project / "runs/a/config.yaml").write_text(text)
    with pytest.raises(
        ConfigError, match=r"runs/a/config.yaml: env.id = 'foreign:Task-v0': names the module 'foreign'"
    ):
        load_config_file("runs/a/config.yaml")
    (project / "config.yaml").write_text(text)
    with pytest.raises(EnvironmentOptionError, match=r"AssertionError at .*: imported"):
        load_config_file("config.yaml")
    with pytest.raises(EnvironmentOptionError, match=r"AssertionError at .*: imported"):
        load_config_file("runs/a/config.yaml", trust_modules=True)


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """A folder beside the project: settings, a network and a package, and it is on Python's path, as is its parent."""
    folder = tmp_path / "theirs"
    for name in ("tasks.py", "bundle/net.py", "lib/site-packages/installed_there.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("raise AssertionError('imported')\n")
    monkeypatch.setattr(
        sys, "path", [str(folder), str(folder / "lib/site-packages"), str(tmp_path), *sys.path]
    )
    return folder


def settings(folder, text):
    (folder / "ant.yaml").write_text(text)
    return folder / "ant.yaml"


@pytest.mark.parametrize(
    "text",
    [
        "env: {id: 'tasks:Task-v0'}",
        "env: {id: 'theirs.tasks:Task-v0'}",
        "{env: {id: Ant-v5}, network: {module: 'bundle.net:Net'}}",
        "{env: {id: Ant-v5}, network: {module: '../theirs/tasks.py:Net'}}",
        "{env: {id: 'isaacgym/Ant', kwargs: {python: ../theirs/tasks.py}}}",
    ],
)
def test_a_config_file_from_elsewhere_does_not_bring_its_code(project, theirs, text):
    for file in (settings(theirs, text), "../theirs/ant.yaml"):
        with pytest.raises(ConfigError, match="lies beside this file") as error:
            load_config_file(file)
        assert "--trust-modules" in str(error.value)
    (project / "link.yaml").symlink_to(theirs / "ant.yaml")
    with pytest.raises(ConfigError, match="lies beside this file"):
        load_config_file("link.yaml")
    assert not {"tasks", "theirs", "bundle"} & set(sys.modules)


@pytest.mark.parametrize("name", ["site-packages", "dist-packages"])
def test_a_folder_that_came_with_a_config_file_is_no_installed_package_by_its_name(project, theirs, name):
    code = theirs / name / "evil.py"
    code.parent.mkdir()
    code.write_text("raise AssertionError('imported')\n")
    for text in (
        f"{{env: {{id: Ant-v5}}, network: {{module: '../theirs/{name}/evil.py:Net'}}}}",
        f"{{env: {{id: 'isaacgym/Ant', kwargs: {{python: ../theirs/{name}/evil.py}}}}}}",
    ):
        with pytest.raises(ConfigError, match="lies beside this file"):
            load_config_file(settings(theirs, text))


def test_a_config_file_from_elsewhere_may_name_all_other_code(project, theirs, monkeypatch):
    def imports(text, **options):
        with pytest.raises(EnvironmentOptionError, match=r"AssertionError at .*: imported"):
            load_config_file(settings(theirs, text), **options)

    imports("env: {id: 'foreign:Task-v0'}")  # on Python's path, in a third folder
    imports("env: {id: 'own:Task-v0'}")
    imports("env: {id: 'installed_there:Task-v0'}")
    imports("env: {id: 'tasks:Task-v0'}", trust_modules=True)
    assert load_config_file(settings(theirs, "env: {id: Ant-v5}")).env.id == "Ant-v5"
    # The project in a folder of the settings is still the project.
    with pytest.raises(EnvironmentOptionError, match="imported"):
        load_config_file(settings(project.parent, "env: {id: 'own:Task-v0'}"))
    monkeypatch.chdir(theirs)
    imports("env: {id: 'tasks:Task-v0'}")


def test_a_config_file_that_is_a_link_is_of_the_folder_where_it_lies(project, tmp_path):
    target = project / "came/target.yaml"
    target.write_text("env: {id: 'came.with:Task-v0'}\n")
    link = project / "came/runs/b/config.yaml"
    link.symlink_to(target)
    with pytest.raises(ConfigError, match=r"came/with\.py"):
        load_config_file(link)
    link.unlink()
    (tmp_path / "target.yaml").write_text(target.read_text())
    link.symlink_to(tmp_path / "target.yaml")
    with pytest.raises(ConfigError, match=r"came/with\.py"):
        refuse(project, RunSpec(env=EnvSpec(id="came.with:Task-v0")), "came/runs/b")
