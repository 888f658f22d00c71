"""Groups of tensors by depth and by component, of networks that people use."""

from __future__ import annotations

import torchvision
from hypothesis import given
from hypothesis import strategies as st

from negmerge.checkpoints.groups import MOST_GROUPS, groups_by

words = st.sampled_from(["stem", "blocks.0", "blocks.1", "blocks.12", "head", "layer2.0", "norm"])
names = st.lists(
    st.builds("{}.{}.weight".format, words, st.sampled_from(["attn.q", "mlp", "fc1", "bn", "x.y"])),
    unique=True,
    min_size=1,
)


@given(names, st.sampled_from(["depth", "component"]))
def test_every_tensor_is_in_exactly_one_of_few_groups(names, by):
    found = groups_by(by, {name: float(k) for k, name in enumerate(names)})
    assert sorted(name for own in found.values() for name in own) == sorted(names)
    assert 1 <= len(found) <= MOST_GROUPS
    assert all(found.values())


def test_a_resnet():
    network = torchvision.models.resnet18()
    lengths = {name: 1.0 for name, _ in network.named_parameters()}
    assert [*groups_by("depth", lengths)] == [
        "conv1 to layer1.0", "layer1.1 to layer2.1", "layer3.0 to layer3.1", "layer4.0 to fc",
    ]  # fmt: skip
    found = groups_by("component", lengths)
    assert {*found} == {"conv", "bn", "downsample", "fc"}
    assert found["fc"] == ["fc.weight", "fc.bias"]
    assert "layer3.1.conv2.weight" in found["conv"]


def test_a_transformer_and_the_kinds_in_which_tau_is_short():
    parts = ["self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "input_layernorm"]
    lengths = {"model.embed_tokens.weight": 9.0}
    lengths |= {f"model.layers.{k}.{part}.weight": 5.0 for k in range(8) for part in parts}
    lengths |= {"model.norm.weight": 0.1, "lm_head.weight": 0.2}
    depth = groups_by("depth", lengths)
    assert [*depth] == ["model.embed_tokens to 1", "2 to 4", "5 to 6", "7 to lm_head"]
    component = groups_by("component", lengths)
    assert [*component] == ["self_attn", "mlp", "input_layernorm", "others"]
    assert component["others"] == [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    ]
