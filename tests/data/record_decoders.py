"""Records folders of decoders as the Hugging Face hub has them, for tests/hub/decoders.rs and runtime/models/tests/generate.rs.

Needs torch, transformers (5), tokenizers, safetensors and gguf. Run in this folder: python record_decoders.py. It writes, with random
weights of fixed seeds in bf16,
    hub/llama3              LlamaForCausalLM: frequencies scaled as in Llama 3.1, a tied head, a byte-level tokenizer, two ends of a text
    hub/mistral             MistralForCausalLM: a sliding window of 4, heads wider than width / heads, a head of its own, in shards
    hub/qwen2               Qwen2ForCausalLM: biases of queries, keys and values, a tied head
    hub/qwen3               Qwen3ForCausalLM: norms of heads, heads wider than width / heads, a head of its own
    gguf/qwen2.gguf, qwen3.gguf     the weights of the last two under the names and metadata of llama.cpp's converter, in F32
    hub/decoders.safetensors        NAME/x and NAME/logits, which transformers computes in f32; generated/prompt and generated/tokens, the
                            prompt PROMPT and its greedy continuation by llama3, which the second end of its generation_config.json ends
"""
import json, os, shutil
import gguf, torch, transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

HERE = os.path.dirname(os.path.abspath(__file__))
PROMPT = "Once upon a time there was a naïve cat."
cases = {}


def randomized(model, seed):
    """Random weights, none of which is a one or a zero that would hide a mix-up."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            value.copy_(1 + 0.3 * noise if name.endswith("norm.weight") else 0.3 * noise)
    return model


def folder(name):
    path = os.path.join(HERE, "hub", name)
    shutil.rmtree(path, ignore_errors=True)
    os.makedirs(path)
    return path


def record(name, config, seed, tokens, change=None, **options):
    path = folder(name)
    model = randomized(getattr(transformers, config.architectures[0])(config), seed)
    if change:
        change(model)
    model.to(torch.bfloat16).save_pretrained(path, **options)
    whole = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    cases[f"{name}/x"] = tokens.to(torch.int32)
    cases[f"{name}/logits"] = whole(tokens).logits.detach().contiguous()
    return path, whole


def tokenizer():
    own = Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    own.train_from_iterator([PROMPT, "the cat sat on the mat", "a time upon a time, the naïve mat was there"], trainer)
    own.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    return own


def exported(name, arch, model):
    """A GGUF file as llama.cpp's converter makes it."""
    config, key = model.config, gguf.MODEL_ARCH_NAMES[arch]
    writer = gguf.GGUFWriter(os.path.join(HERE, "gguf", f"{name}.gguf"), key)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if name == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for tensor, value in model.state_dict().items():
        if not (tensor == "lm_head.weight" and config.tie_word_embeddings):
            writer.add_tensor(names.get_name(tensor, (".weight", ".bias")), value.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


sizes = dict(vocab_size=23, hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5]])
plain = {"rope_type": "default", "rope_theta": 10000.0}

config = MistralConfig(**sizes | dict(head_dim=6), sliding_window=4, rope_parameters=plain, tie_word_embeddings=False, architectures=["MistralForCausalLM"])
record("mistral", config, 1, tokens, max_shard_size="4KB")
config = Qwen2Config(**sizes, rope_parameters=plain | {"rope_theta": 1000.0}, tie_word_embeddings=True, architectures=["Qwen2ForCausalLM"])
exported("qwen2", gguf.MODEL_ARCH.QWEN2, record("qwen2", config, 2, tokens)[1])
config = Qwen3Config(**sizes, head_dim=8, rope_parameters=plain | {"rope_theta": 1000000.0}, tie_word_embeddings=False, architectures=["Qwen3ForCausalLM"])
exported("qwen3", gguf.MODEL_ARCH.QWEN3, record("qwen3", config, 3, tokens)[1])

own = tokenizer()
text = torch.tensor([own.encode(PROMPT).ids])
scaled = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
config = LlamaConfig(**sizes | dict(vocab_size=304, hidden_size=32, max_position_embeddings=256), rope_parameters=scaled, tie_word_embeddings=True, architectures=["LlamaForCausalLM"], bos_token_id=0, eos_token_id=1)


def readable(model):
    """Tokens that are special, or not printable, are unlikely."""
    for token in range(config.vocab_size):
        if token < 4 or not (own.decode([token]).isascii() and own.decode([token]).isprintable()):
            model.model.embed_tokens.weight.data[token] *= 0.05


path, whole = record("llama3", config, 4, text, readable)
own.save(os.path.join(path, "tokenizer.json"), pretty=False)
every = whole.generate(text, max_new_tokens=80, do_sample=False, eos_token_id=-1, pad_token_id=1)[0, text.shape[1] :]
for at in range(len(every)):
    logits = whole(torch.cat([text[0], every[:at]])[None]).logits[0, -1].sort(descending=True).values
    assert logits[0] - logits[1] > 1e-3 * logits[0].abs(), "a continuation that rounding does not change"
end = next(at for at in range(len(every) - 1, 20, -1) if every[at] not in every[:at])
with open(os.path.join(path, "generation_config.json"), "w") as file:
    json.dump({"bos_token_id": 0, "eos_token_id": [1, int(every[end])]}, file, indent=2)
cases["generated/prompt"], cases["generated/tokens"] = text[0].to(torch.int32), every[:end].to(torch.int32).contiguous()
print(end, repr(own.decode(every[:end].tolist())))

save_file(cases, os.path.join(HERE, "hub", "decoders.safetensors"))
for name in ["llama3", "mistral", "qwen2", "qwen3"]:
    for file in sorted(os.listdir(os.path.join(HERE, "hub", name))):
        print(os.path.getsize(os.path.join(HERE, "hub", name, file)), f"{name}/{file}")
