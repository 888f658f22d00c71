"""A misspelt name of anything is answered with the nearest one that is known."""

from __future__ import annotations

import shlex

import pytest

import negmerge as nm
from running import negmerge_here

CHANGES = {
    "sed=1": "sed: there is no such field; did you mean 'seed'?",
    "modle.name=a": "modle: there is no such field; did you mean 'model'?",
    "splits.validation=0": "splits: there is no such field; did you mean 'split'?",
    "colour=red": "colour: there is no such field; there are: gradcam, data, split, model",
    "train.epoch=1": "train.epoch: there is no such field; did you mean 'epochs'?",
    "pool.seting.lr=1": "pool.seting: there is no such field; did you mean 'settings'?",
    "pool.settings.lrr=1": "pool.settings.lrr: there is no such field; did you mean 'lr'?",
    "pool.settings.augment.flp=1": "augment.flp: there is no such field; did you mean 'flip'?",
    "pool.grid={epoch: [1]}": "grid.epoch: no such hyper-parameter; did you mean 'epochs'?",
    "pool.grid={augment.flp: [1]}": "grid.augment.flp: no such hyper-parameter; did you mean",
    "pool.grid={augmnt.flip: [1]}": "grid.augmnt.flip: no such hyper-parameter",
    "split.forget={clas: 3}": "split.forget.clas: there is no such field; did you mean 'class'?",
    "data.limit.trian=3": "data.limit.trian: there is no such field; did you mean 'train'?",
    "methods=[{name: consensus, lable: a}]": "methods.0.lable: there is no such field; did you mean"
    " 'label'?",
    "methods=[{name: consensus, subset: {cont: 1}}]": "subset.count: Field required",
    "executor.knd=ray": "executor.knd: there is no such field; did you mean 'kind'?",
    "buffers=kep": "got 'kep'; did you mean 'keep'?",
    "train.schedule=cosinus": "got 'cosinus'; did you mean 'cosine'?",
    "scenario=clasify": "unknown scenario 'clasify'; did you mean 'classify'?",
    "methods=[consesus]": "unknown method 'consesus'; did you mean 'consensus'?",
    "methods=[slaun]": "unknown method 'slaun'; did you mean 'salun'",
    "methods=[{name: consensus, options: {quorm: 1}}]": "did you mean 'quorum'?",
    "methods=[{name: random_label, options: {epoch: 1}}]": "did you mean 'epochs'?",
    "methods=[{name: greedy, options: {oder: soup}}]": "did you mean 'order'?",
    "search.criterion=keep_retin": "did you mean 'keep_retain'?",
    "data.name=fashion_smal": "did you mean 'fashion_small'",
    "model.name=resnet19": "did you mean 'resnet18'",
    "split.forget={class: sneker}": "did you mean 'sneaker'?",
    "gradcam.classes=[sneker]": "did you mean 'sneaker'?",
}
COMMANDS = {
    "lst rules": 'Did you mean "list"?',
    "list rulez": 'Did you mean "rules"?',
    "merge --rul x": "Did you mean --rule?",
    "merge a b -o c --buffers kep": 'Did you mean "keep"?',
    "merge a b -o c --rule consesus": "did you mean 'consensus'?",
    "merge a b -o c --option quorm=1": "did you mean 'quorum'?",
    "merge a b -o c --set executor.knd=ray": "did you mean 'kind'?",
    "unlearn dmo": "did you mean 'demo'?",
    "reproduce T22": "did you mean 'T2'",
    "reproduce t2a": "did you mean 'T2'",
    "study demo --seeds 0 --against consesus": "did you mean 'consensus'?",
    "unlearn demo_text --set data.records=persns": "did you mean 'persons'?",
    "unlearn demo_text --set model.name=stories": "did you mean 'stories15m'?",
    "unlearn clip_vit_b32 --set data.words=carz": "did you mean 'cars'?",
    "unlearn clip_vit_b32 --set model.name=ViT-B32": "did you mean 'ViT-B-32'",
    "check clip ViT-B-32 --set data.limt.test=3": "did you mean 'limit'?",
}


def told(place, *words: str) -> str:
    """The error of a command, which is one line."""
    _, err = negmerge_here(place, *words, code=2)
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("change", CHANGES)
def test_recipes(change, tmp_path):
    assert CHANGES[change] in told(tmp_path, "unlearn", "demo", "--dry-run", "--set", change)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command, tmp_path):
    assert COMMANDS[command] in told(tmp_path, *shlex.split(command))


def test_arguments_in_python():
    with pytest.raises(nm.NegMergeError, match="did you mean 'layout'"):
        nm.merge("base", ["model"], layuot="dense")
