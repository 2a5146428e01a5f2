"""Checkpoints behind a URL."""

from __future__ import annotations

from errno import ENOSPC
from itertools import islice

import pytest

from sley_checkpoint.folders import RemoteFolder, open_folder
from sley_checkpoint.format import INDEX
from sley_checkpoint.reader import newest, read, verify
from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import UsageError
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import small_plan

fsspec = pytest.importorskip("fsspec")


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_run_saves_to_a_url_and_goes_on_from_there(texts, tmp_path, kind):
    url = f"{kind}://{tmp_path}/saved"
    plan = plan_from_dict(small_plan(run__steps=6, batch__micro_size=8, checkpoint={"every_steps": 2, "folder": url}), texts)
    with assemble(plan, World.alone("cpu")) as run:
        run.train()
        rows = [run.step()]
    folder = open_folder(url)
    assert folder.names() == ["step-00000004", "step-00000006"]
    found = newest(url)
    assert found == (f"{url}/step-00000006", [])
    assert read(found.path).step == 6
    with assemble(plan, World.alone("cpu")) as run:
        assert run.load_checkpoint("auto").step == 6
        again = run.step()
    assert again["loss"] == rows[0]["loss"]

    half = folder.child("step-00000006")
    half.delete(INDEX)
    assert newest(url) == (f"{url}/step-00000004", []), "without its index it was never one"
    whole = folder.child("step-00000004")
    data = whole.read("rank-00000.safetensors")
    whole.write("rank-00000.safetensors", [data[:-1]])
    (damage,) = verify(whole.text)
    assert "is cut short" in damage.how
    with assemble(plan, World.alone("cpu")) as run:
        run.step()
        run.save_checkpoint()
        assert folder.names() == ["step-00000001-1", "step-00000004", "step-00000006"], "another attempt may be writing"
        folder.child("step-00000001-1").delete(INDEX)
        run.save_checkpoint()
    assert folder.names() == ["step-00000001-2", "step-00000004", "step-00000006"], "what it has half written is gone"


def test_a_store_without_room_leaves_nothing_of_a_save_and_takes_the_next(texts, monkeypatch):
    """It refuses in the middle of the second save's file of tensors."""
    url = "memory://full/saved"
    plan = plan_from_dict(small_plan(checkpoint={"every_steps": 1, "folder": url, "mode": "sync"}), texts)
    plain, room = RemoteFolder.write, [2]

    def write(self, name, chunks):
        room[0] -= name.endswith(".safetensors")
        return plain(self, name, refusing(chunks) if room[0] == 0 else chunks)

    def refusing(chunks):
        yield from islice(chunks, 3)
        raise OSError(ENOSPC, "No space left on device")

    monkeypatch.setattr(RemoteFolder, "write", write)
    with assemble(plan, World.alone("cpu")) as run:
        run.step()
        run.step()
        assert open_folder(url).names() == ["step-00000001"]
        assert newest(url) == (f"{url}/step-00000001", [])
        assert any(note.endswith("No space left on device; the run goes on without it") for note in run.notes)
        run.step()
        assert run.counts["checkpoint"] | {"saved": 2, "failed": 1} == run.counts["checkpoint"]
    assert newest(url) == (f"{url}/step-00000003", [])


def test_a_url_that_nothing_opens_is_said():
    with pytest.raises(UsageError, match="no-fsspec"):
        read("nosuch://there/is")
