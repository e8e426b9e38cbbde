"""Filling a model from safetensors files: completeness, damage, and what may be left over."""

import gc
import json
import shutil
import warnings
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm.errors import CheckpointError
from nanovllm.layers.attention import select_backend
from nanovllm.layers.ops import select_ops
from nanovllm.models.config import load_decoder_config
from nanovllm.models.decoder import CausalLM
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.loader import fill_dummy, load_weights

CPU = torch.device("cpu")


def build(folder, dtype=torch.float32, tp=None):
    config = load_decoder_config(folder)
    attention = select_backend("auto", CPU, dtype, config.head_dim, 16)
    return CausalLM(config, tp or TPGroup(), select_ops(CPU), attention, CPU, dtype)


@pytest.fixture
def copy_of(tiny_checkpoint, tmp_path):
    """A private copy of a checkpoint, to be damaged."""

    def copy(**options):
        return shutil.copytree(tiny_checkpoint(**options), tmp_path / "checkpoint")

    return copy


def rewrite(folder, change):
    """Apply `change` to the dict of all tensors of a single-file checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def assert_equals_file(model, tensors):
    """Every checkpoint tensor is found, unchanged, in the model (tp 1)."""
    ours = dict(model.named_parameters())
    for name, tensor in tensors.items():
        owner, _, leaf = name.rpartition(".")
        parent, _, module = owner.rpartition(".")
        shard = module.removesuffix("_proj")
        for merged in ("qkv_proj", "gate_up_proj"):
            parameter = ours.get(f"{parent}.{merged}.{leaf}")
            if parameter is not None and shard in parameter.shards:
                rows = [shape[0] for shape in parameter.shards.values()]
                index = list(parameter.shards).index(shard)
                assert torch.equal(parameter.split(rows)[index], tensor), name
                break
        else:
            assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("attention_bias", [True, False])
def test_every_tensor_arrives_where_it_belongs(tied, attention_bias, tiny_checkpoint):
    folder = tiny_checkpoint(tied=tied, attention_bias=attention_bias)
    model = build(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_weights(model, folder)
    tensors = load_file(folder / "model.safetensors")
    assert ("lm_head.weight" in tensors) is not tied
    assert_equals_file(model, tensors)
    assert sum(p.numel() for p in model.parameters()) == sum(t.numel() for t in tensors.values())


def test_a_tied_head_is_the_very_same_parameter(tiny_checkpoint):
    tied, untied = build(tiny_checkpoint(tied=True)), build(tiny_checkpoint(tied=False))
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


def test_several_files_with_an_index(tiny_checkpoint):
    folder = tiny_checkpoint(tied=False, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    model = build(folder)
    load_weights(model, folder)
    single = tiny_checkpoint(tied=False)
    assert_equals_file(model, load_file(single / "model.safetensors"))


def test_weights_are_converted_to_the_model_dtype(tiny_checkpoint):
    folder = tiny_checkpoint()
    model = build(folder, torch.bfloat16)
    load_weights(model, folder)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    expected = load_file(folder / "model.safetensors")["model.norm.weight"].bfloat16()
    assert torch.equal(model.model.norm.weight, expected)


def test_a_folder_without_weights_is_refused(copy_of):
    """Upstream found no file, loaded nothing and printed nonsense (N22 a)."""
    folder = copy_of()
    model = build(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        load_weights(model, folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.self_attn.q_norm.weight",
        "lm_head.weight",
    ],
)
def test_one_missing_tensor_is_named(name, copy_of):
    """Uninitialised weights were used without a word (N22 b); also when part of a merged one."""
    folder = copy_of(tied=False)
    rewrite(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=rf"lacks 1 of \d+ tensors: {name};"):
        load_weights(build(folder), folder)


def test_many_missing_tensors_are_counted(copy_of):
    folder = copy_of()
    rewrite(folder, lambda t: [t.pop(name) for name in list(t) if "layers.1" in name])
    with pytest.raises(CheckpointError, match=r"lacks 11 of 24 tensors: .* and 3 more"):
        load_weights(build(folder), folder)


def test_one_missing_file_of_the_index_is_named(copy_of):
    folder = copy_of(tied=False, max_shard_size="100KB")
    lost = sorted(folder.glob("*.safetensors"))[1]
    model = build(folder)
    lost.unlink()
    with pytest.raises(CheckpointError, match=lost.name):
        load_weights(model, folder)


def test_a_broken_index_is_refused(copy_of):
    folder = copy_of(tied=False, max_shard_size="100KB")
    model = build(folder)
    for text in ("{", "[]", json.dumps({"metadata": {}})):
        (folder / "model.safetensors.index.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"index\.json"):
            load_weights(model, folder)


def test_an_unused_tensor_is_tolerated_with_a_warning(copy_of):
    folder = copy_of()
    rewrite(folder, lambda t: t.update({"model.layers.7.extra": torch.zeros(2)}))
    with pytest.warns(UserWarning, match=r"unused tensors: model\.layers\.7\.extra"):
        load_weights(build(folder), folder)


def test_known_leftovers_are_ignored_silently(copy_of):
    folder = copy_of(tied=True)

    def add(tensors):
        tensors["lm_head.weight"] = torch.zeros(501, 64)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(16)

    rewrite(folder, add)
    save_file({"norm.weight": torch.zeros(3)}, folder / "consolidated.safetensors")
    model = build(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_weights(model, folder)
    assert model.lm_head.weight.any()


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.embed_tokens.weight", (500, 64)),
        ("model.layers.0.self_attn.v_proj.weight", (32, 64)),
        ("model.norm.weight", (1,)),
    ],
)
def test_a_wrong_shape_is_named_with_both_shapes(name, shape, copy_of):
    """A [1] tensor would even be broadcast by a plain copy."""
    folder = copy_of()
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(shape)}))
    with pytest.raises(CheckpointError) as error:
        load_weights(build(folder), folder)
    assert name in str(error.value)
    assert str(list(shape)) in str(error.value)


@pytest.mark.parametrize("keep", [0, 5, 300, -1000])
def test_a_truncated_file_is_named(keep, copy_of):
    folder = copy_of()
    model = build(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged or incomplete"):
        load_weights(model, folder)


def test_a_pointer_file_instead_of_weights_is_named(copy_of):
    folder = copy_of()
    model = build(folder)
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid 0\n")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged or incomplete"):
        load_weights(model, folder)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_dummy_weights_are_seeded_finite_and_not_degenerate(tp_size, tiny_checkpoint):
    folder = tiny_checkpoint(tied=False)
    for rank in range(tp_size):
        models = [build(folder, tp=TPGroup(rank, tp_size)) for _ in range(3)]
        for model, seed in zip(models, (7, 7, 8), strict=True):
            fill_dummy(model, seed)
        same, other = (
            [
                torch.equal(a, b)
                for a, b in zip(models[0].parameters(), model.parameters(), strict=True)
                if a.dim() == 2
            ]
            for model in models[1:]
        )
        assert all(same)
        assert not any(other)
        for name, parameter in models[0].named_parameters():
            assert parameter.isfinite().all(), name
            if parameter.dim() == 2:
                assert 0.05 < parameter.std() < 0.2, name
        head = models[0].lm_head
        assert not head.weight[head.num_valid :].any()


def test_building_and_filling_leave_torch_as_it_was(tiny_checkpoint, torch_globals):
    folder = tiny_checkpoint()
    before = torch_globals()
    model = build(folder, torch.bfloat16)
    load_weights(model, folder)
    fill_dummy(model, 1)
    assert torch_globals() == before


def test_a_dropped_model_frees_its_weights_at_once(tiny_checkpoint):
    """A reference cycle would keep GPU memory until the garbage collector happens to run."""
    model = build(tiny_checkpoint())
    alive = [weakref.ref(parameter) for parameter in model.parameters()]
    gc.disable()
    try:
        del model
        assert [ref() for ref in alive] == [None] * len(alive)
    finally:
        gc.enable()
