"""Records small models in the layouts of the Hugging Face hub, for tests/hub/.

Needs torch, torchvision, transformers, timm and safetensors. Run in this folder: python record_hub.py. It writes into hub/, with
random weights of fixed seeds, and with the tensors beside them that published files have (masks, positions, counters):
    gpt2                    GPT2LMHeadModel as save_pretrained writes it, names under `transformer.`
    gpt2_bare               the same weights as the published GPT-2 has them: no prefix, masks `attn.bias`
    bert                    BertForMaskedLM under `bert.`, norms called gamma and beta as in the first published BERT
    minilm                  BertModel without a prefix, with i64 `embeddings.position_ids`, as sentence encoders have it
    llama                   LlamaForCausalLM in bf16 and in shards with an index, two key heads for four query heads
    llama_tied              one with tied embeddings in one file of f16
    vit, vit_timm           ViTForImageClassification, and the same weights in timm's VisionTransformer (query, key and value joined)
    resnet_torchvision      torchvision's ResNet with a sixteenth of the channels, i64 `num_batches_tracked`
    resnet_transformers     ResNetForImageClassification
cases.safetensors has the input and the output of each: NAME/x, NAME/logits (NAME/hidden and NAME/pooled for minilm).
"""
import functools, os, shutil
import timm, torch, torchvision, transformers
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import VisionTransformer
from torchvision.models.resnet import BasicBlock

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hub")
cases = {}


def randomized(model, seed):
    """Random weights, none of which is a one or a zero that would hide a mix-up."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in list(model.named_parameters()) + list(model.named_buffers()):
            # Frequencies of rotary positions are computed, not stored.
            if value.dtype.is_floating_point and not name.endswith("inv_freq"):
                noise = torch.randn(value.shape, generator=generator)
                one = value.ndim == 1 and ("norm" in name.lower() or "bn" in name or "ln_" in name or "running_var" in name or "downsample.1" in name)
                value.copy_(1 + 0.1 * noise.abs() if one and not name.endswith(("bias", "running_mean")) else 0.3 * noise)
    return model.eval()


def in_f32(model, config):
    """A Llama with the weights of one in halves, whose frequencies were never rounded."""
    whole = transformers.LlamaForCausalLM(config)
    whole.load_state_dict(model.float().state_dict())
    return whole.eval()


def folder(name):
    path = os.path.join(HERE, name)
    shutil.rmtree(path, ignore_errors=True)
    os.makedirs(path)
    return path


def saved(model, name, **options):
    """As the library writes it, without the files beside the weights."""
    path = folder(name)
    model.save_pretrained(path, **options)
    for other in os.listdir(path):
        if "safetensors" not in other:
            os.remove(os.path.join(path, other))
    return path


def plain(tensors, name):
    save_file({k: v.contiguous().clone() for k, v in tensors.items()}, os.path.join(folder(name), "model.safetensors"), metadata={"format": "pt"})


def case(name, x, **outputs):
    cases[f"{name}/x"] = x.to(torch.int32) if x.dtype == torch.int64 else x.clone()
    for key, value in outputs.items():
        cases[f"{name}/{key}"] = value.detach().float().contiguous().clone()


torch.manual_seed(0)
tokens = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
image = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))

config = transformers.GPT2Config(vocab_size=17, n_positions=6, n_embd=8, n_layer=2, n_head=2, attn_implementation="eager")
gpt = randomized(transformers.GPT2LMHeadModel(config), 2)
path = saved(gpt, "gpt2")
bare = {k.removeprefix("transformer."): v for k, v in load_file(os.path.join(path, "model.safetensors")).items() if k != "lm_head.weight"}
for block in range(2):
    bare[f"h.{block}.attn.bias"] = torch.ones(6, 6).tril()[None, None]
    bare[f"h.{block}.attn.masked_bias"] = torch.tensor(-1e4)
plain(bare, "gpt2_bare")
case("gpt2", tokens, logits=gpt(tokens).logits)

sizes = dict(vocab_size=19, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12, max_position_embeddings=10, type_vocab_size=2)
config = transformers.BertConfig(**sizes, attn_implementation="eager")
bert = randomized(transformers.BertForMaskedLM(config), 3)
path = saved(bert, "bert")
old = {k.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): v for k, v in load_file(os.path.join(path, "model.safetensors")).items()}
old["bert.pooler.dense.weight"], old["bert.pooler.dense.bias"] = torch.zeros(8, 8), torch.zeros(8)
old["cls.seq_relationship.weight"], old["cls.seq_relationship.bias"] = torch.zeros(2, 8), torch.zeros(2)
plain(old, "bert")
case("bert", tokens, logits=bert(tokens).logits)

minilm = randomized(transformers.BertModel(config), 4)
path = saved(minilm, "minilm")
bare = load_file(os.path.join(path, "model.safetensors"))
bare["embeddings.position_ids"] = torch.arange(10)[None]
plain(bare, "minilm")
output = minilm(tokens)
case("minilm", tokens, hidden=output.last_hidden_state, pooled=output.pooler_output)

config = transformers.LlamaConfig(vocab_size=23, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=20, max_position_embeddings=32, tie_word_embeddings=False, attn_implementation="eager")
llama = randomized(transformers.LlamaForCausalLM(config), 5)
llama = llama.to(torch.bfloat16)
saved(llama, "llama", max_shard_size="4KB")
case("llama", tokens, logits=in_f32(llama, config)(tokens).logits)
config.tie_word_embeddings = True
llama = randomized(transformers.LlamaForCausalLM(config), 6).half()
saved(llama, "llama_tied")
case("llama_tied", tokens, logits=in_f32(llama, config)(tokens).logits)

config = transformers.ViTConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=16, patch_size=4, num_labels=5, attn_implementation="eager")
vit = randomized(transformers.ViTForImageClassification(config), 7)
path = saved(vit, "vit")
there = load_file(os.path.join(path, "model.safetensors"))
case("vit", image, logits=vit(image).logits)
moved = {"cls_token": there["vit.embeddings.cls_token"], "pos_embed": there["vit.embeddings.position_embeddings"]}
for part in ["weight", "bias"]:
    moved[f"patch_embed.proj.{part}"] = there[f"vit.embeddings.patch_embeddings.projection.{part}"]
    moved[f"norm.{part}"], moved[f"head.{part}"] = there[f"vit.layernorm.{part}"], there[f"classifier.{part}"]
    for block in range(2):
        of = f"vit.encoder.layer.{block}"
        moved[f"blocks.{block}.attn.qkv.{part}"] = torch.cat([there[f"{of}.attention.attention.{one}.{part}"] for one in ["query", "key", "value"]])
        for to, name in [("norm1", "layernorm_before"), ("norm2", "layernorm_after"), ("attn.proj", "attention.output.dense"), ("mlp.fc1", "intermediate.dense"), ("mlp.fc2", "output.dense")]:
            moved[f"blocks.{block}.{to}.{part}"] = there[f"{of}.{name}.{part}"]
of_timm = VisionTransformer(img_size=16, patch_size=4, embed_dim=8, depth=2, num_heads=2, mlp_ratio=2, num_classes=5, norm_layer=functools.partial(torch.nn.LayerNorm, eps=1e-12)).eval()
of_timm.load_state_dict(moved)
assert torch.allclose(of_timm(image), vit(image).logits, atol=1e-5)
plain(of_timm.state_dict(), "vit_timm")


class Narrow(torchvision.models.ResNet):
    """torchvision's network with a sixteenth of its channels."""

    @property
    def inplanes(self):
        return self.__dict__["planes"]

    @inplanes.setter
    def inplanes(self, planes):
        self.__dict__["planes"] = 4 if planes == 64 and "planes" not in self.__dict__ else planes

    def _make_layer(self, block, planes, *rest, **named):
        return super()._make_layer(block, planes // 16, *rest, **named)


assert set(timm.create_model("resnet18").state_dict()) == set(torchvision.models.resnet18().state_dict()), "timm has torchvision's names"
resnet = Narrow(BasicBlock, [1, 1, 1, 1])
resnet.fc = torch.nn.Linear(32, 5)
resnet = randomized(resnet, 8)
picture = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(9))
plain(resnet.state_dict(), "resnet_torchvision")
case("resnet_torchvision", picture, logits=resnet(picture))

config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[2, 1], layer_type="basic", num_labels=5)
resnet = randomized(transformers.ResNetForImageClassification(config), 10)
saved(resnet, "resnet_transformers")
case("resnet_transformers", picture, logits=resnet(picture).logits)

save_file(cases, os.path.join(HERE, "cases.safetensors"))
total = 0
for root, _, files in sorted(os.walk(HERE)):
    for name in sorted(files):
        size = os.path.getsize(os.path.join(root, name))
        total += size
        print(size, os.path.relpath(os.path.join(root, name), HERE))
print(total)
