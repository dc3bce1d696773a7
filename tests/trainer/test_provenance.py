"""The commit of a working tree as its files tell it."""

import subprocess

import pytest

from unisono.watch.origin import git_state

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def git(folder, *arguments):
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "init.defaultBranch=main"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_the_commit_is_the_one_that_git_tells(tmp_path):
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) is None  # no commit yet
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "deep" / "folder").mkdir(parents=True)
    assert git_state(tmp_path / "deep" / "folder") == {"commit": commit, "branch": "main"}
    git(tmp_path, "pack-refs", "--all")
    assert git_state(tmp_path) == {"commit": commit, "branch": "main"}
    git(tmp_path, "worktree", "add", "-q", "-b", "topic/a", str(tmp_path / "other"))
    assert git_state(tmp_path / "other") == {"commit": commit, "branch": "topic/a"}
    git(tmp_path, "checkout", "-q", "--detach")
    assert git_state(tmp_path) == {"commit": commit, "branch": None}


@pytest.mark.parametrize("head", ["", "ref: ", "ref: ../../etc/passwd", "ref: /etc/passwd", f"{COMMIT}x", "\xff"])
def test_a_head_that_says_no_commit_is_none(tmp_path, head):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_bytes(head.encode("latin-1"))
    assert git_state(tmp_path) is None
