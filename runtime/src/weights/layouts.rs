//! Ready-made rules for the layouts of published weights.

use super::rules::Rules;

impl Rules {
    /// GPT-2 in the layout of Hugging Face's `GPT2LMHeadModel`: fully connected layers are stored as
    /// `[inputs, outputs]`. Files without the prefix `transformer.`, as the published ones, and with
    /// stored masks load as well.
    ///
    /// The model's names are those of `slabwise_models::Gpt`: `transformer.wte.weight`,
    /// `transformer.wpe.weight`, `transformer.h.0.ln_1.weight`,
    /// `transformer.h.0.attn.c_attn.weight` (query, key and value joined, `[3·width, width]`),
    /// `transformer.h.0.attn.c_proj.weight`, `transformer.h.0.mlp.c_fc.weight`,
    /// `transformer.h.0.mlp.c_proj.weight`, `transformer.ln_f.weight`, each with its `bias`, and
    /// `lm_head.weight` unless the head is tied.
    pub fn gpt2() -> Rules {
        GPT2_PARTS
            .iter()
            .fold(Rules::new(), |rules, part| {
                rules.alias(part, &format!("transformer.{part}"))
            })
            .then(gpt2_layers())
    }

    /// Like [`Rules::gpt2`], and saved without the prefix `transformer.`, as the published files
    /// are.
    pub fn gpt2_bare() -> Rules {
        GPT2_PARTS
            .iter()
            .fold(Rules::new(), |rules, part| {
                rules.rename(part, &format!("transformer.{part}"))
            })
            .then(gpt2_layers())
    }

    /// GPT-2 in the layout of llama.cpp's GGUF files. The model's names are those of
    /// [`Rules::gpt2`]. A file may have a copy of the embedding as its head (`output.weight`); if
    /// llama.cpp stored the two in different types, a model needs a head that is not tied.
    pub fn gpt2_gguf() -> Rules {
        let names = [
            ("token_embd", "wte"),
            ("position_embd", "wpe"),
            ("output_norm", "ln_f"),
            ("blk.{i}.attn_norm", "h.{i}.ln_1"),
            ("blk.{i}.attn_qkv", "h.{i}.attn.c_attn"),
            ("blk.{i}.attn_output", "h.{i}.attn.c_proj"),
            ("blk.{i}.ffn_norm", "h.{i}.ln_2"),
            ("blk.{i}.ffn_up", "h.{i}.mlp.c_fc"),
            ("blk.{i}.ffn_down", "h.{i}.mlp.c_proj"),
        ];
        let rules = Rules::new().rename("output.weight", "lm_head.weight");
        let renamed = names.iter().fold(rules, |rules, (file, model)| {
            rules.rename(
                &format!("{file}.{{p}}"),
                &format!("transformer.{model}.{{p}}"),
            )
        });
        renamed.tied("lm_head.weight", "transformer.wte.weight")
    }

    /// BERT in the layout of Hugging Face's `BertForMaskedLM` and similar models. Files without the
    /// prefix `bert.`, with norms called `gamma` and `beta`, and with stored positions load as
    /// well. A pooler and heads that the model does not have are left out.
    ///
    /// The model's names are those of the files: `bert.embeddings.word_embeddings.weight`,
    /// `bert.embeddings.position_embeddings.weight`, `bert.embeddings.token_type_embeddings.weight`,
    /// `bert.embeddings.LayerNorm.weight`, `bert.encoder.layer.0.attention.self.query.weight`
    /// (`key`, `value`), `bert.encoder.layer.0.attention.output.dense.weight`,
    /// `bert.encoder.layer.0.attention.output.LayerNorm.weight`,
    /// `bert.encoder.layer.0.intermediate.dense.weight`,
    /// `bert.encoder.layer.0.output.dense.weight`, `bert.encoder.layer.0.output.LayerNorm.weight`,
    /// `bert.pooler.dense.weight`, each with its `bias`; heads are `cls.predictions.…` (whose
    /// `decoder.weight` may be tied to the words) and `classifier.weight`.
    pub fn bert() -> Rules {
        bert_parts("", "bert.").tied(
            "cls.predictions.decoder.weight",
            "bert.embeddings.word_embeddings.weight",
        )
    }

    /// MiniLM and other sentence encoders in the layout of Hugging Face's `BertModel`: as
    /// [`Rules::bert`], without the prefix `bert.` in the names of the model and of saved files
    /// (`embeddings.word_embeddings.weight`). Files with the prefix load as well.
    pub fn minilm() -> Rules {
        bert_parts("bert.", "").tied(
            "cls.predictions.decoder.weight",
            "embeddings.word_embeddings.weight",
        )
    }

    /// Llama, Mistral, Qwen and other decoders in the layout of Hugging Face's `LlamaForCausalLM`,
    /// usually bf16 and in shards. A tied head may be stored under either name or both.
    ///
    /// The model's names are those of the files: `model.embed_tokens.weight`,
    /// `model.layers.0.input_layernorm.weight`, `model.layers.0.self_attn.q_proj.weight` (`k_proj`,
    /// `v_proj`, `o_proj`), `model.layers.0.post_attention_layernorm.weight`,
    /// `model.layers.0.mlp.gate_proj.weight` (`up_proj`, `down_proj`), `model.norm.weight`, and
    /// `lm_head.weight` unless the head is tied.
    pub fn llama() -> Rules {
        Rules::new()
            .ignore("model.layers.{i}.self_attn.rotary_emb.inv_freq")
            .tied("lm_head.weight", "model.embed_tokens.weight")
    }

    /// Llama, Mistral and other decoders of the architecture `llama` in the layout of llama.cpp's
    /// GGUF files, with so many attention heads of queries and of keys. The rows of queries and
    /// keys, which llama.cpp stores for interleaved rotary embeddings, are put back in the order of
    /// Hugging Face's files. A head that is missing is tied to the embedding. The model's names are
    /// those of [`Rules::llama`].
    ///
    /// The base of the rotary positions and the ε of the norms are in
    /// [`Weights::metadata`](super::Weights::metadata), as `llama.rope.freq_base` and
    /// `llama.attention.layer_norm_rms_epsilon`. Factors of the frequencies (`rope_freqs.weight`) are
    /// left out, because a model computes them itself ([`Rope::scaling`](crate::tensor::Rope)).
    ///
    /// ```no_run
    /// # use slabwise::prelude::*;
    /// # fn load(session: &mut Session) -> Result<()> {
    /// use slabwise::weights::{Rules, Weights};
    ///
    /// session.load_from(&Weights::open("model-Q4_0.gguf")?, &Rules::llama_gguf(32, 8))?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn llama_gguf(heads: usize, key_heads: usize) -> Rules {
        let rules = Rules::new()
            .deinterleave("blk.{i}.attn_q.weight", heads)
            .deinterleave("blk.{i}.attn_k.weight", key_heads);
        rules.then(decoder_gguf())
    }

    /// Qwen2 and Qwen3 in the layout of llama.cpp's GGUF files, which have rotary embeddings of
    /// halves as Hugging Face's. The model's names are those of [`Rules::llama`], and
    /// `model.layers.0.self_attn.q_proj.bias` (`k_proj`, `v_proj`) or
    /// `model.layers.0.self_attn.q_norm.weight` (`k_norm`).
    pub fn qwen_gguf() -> Rules {
        ["q", "k", "v"].iter().fold(decoder_gguf(), |rules, part| {
            let layer = |end: &str| format!("model.layers.{{i}}.self_attn.{part}_{end}");
            rules
                .rename(&format!("blk.{{i}}.attn_{part}.bias"), &layer("proj.bias"))
                .rename(
                    &format!("blk.{{i}}.attn_{part}_norm.weight"),
                    &layer("norm.weight"),
                )
        })
    }

    /// Vision transformers in the layout of Hugging Face's `ViTForImageClassification`. Files
    /// without the prefix `vit.` load as well; a pooler that the model does not have is left out.
    ///
    /// The model's names are those of the files: `vit.embeddings.cls_token`,
    /// `vit.embeddings.position_embeddings`,
    /// `vit.embeddings.patch_embeddings.projection.weight`,
    /// `vit.encoder.layer.0.layernorm_before.weight`,
    /// `vit.encoder.layer.0.attention.attention.query.weight` (`key`, `value`),
    /// `vit.encoder.layer.0.attention.output.dense.weight`,
    /// `vit.encoder.layer.0.layernorm_after.weight`,
    /// `vit.encoder.layer.0.intermediate.dense.weight`,
    /// `vit.encoder.layer.0.output.dense.weight`, `vit.layernorm.weight`, each with its `bias`, and
    /// `classifier.weight`.
    pub fn vit() -> Rules {
        Rules::new()
            .alias("embeddings.{*rest}", "vit.embeddings.{*rest}")
            .alias("encoder.{*rest}", "vit.encoder.{*rest}")
            .alias("layernorm.{*rest}", "vit.layernorm.{*rest}")
            .alias("pooler.{*rest}", "vit.pooler.{*rest}")
            .ignore_extra("vit.pooler.{*rest}")
    }

    /// Vision transformers in the layout of timm's `VisionTransformer` with class token: query, key
    /// and value are joined. The model's names are those of [`Rules::vit`].
    pub fn vit_timm() -> Rules {
        let block = |from: &str| format!("blocks.{{i}}.{from}.{{p}}");
        let layer = |to: &str| format!("vit.encoder.layer.{{i}}.{to}.{{p}}");
        let rules = Rules::new()
            .rename("cls_token", "vit.embeddings.cls_token")
            .rename("pos_embed", "vit.embeddings.position_embeddings")
            .rename(
                "patch_embed.proj.{p}",
                "vit.embeddings.patch_embeddings.projection.{p}",
            )
            .rename("norm.{p}", "vit.layernorm.{p}")
            .rename("head.{p}", "classifier.{p}");
        let parts =
            ["query", "key", "value"].map(|part| layer(&format!("attention.attention.{part}")));
        [
            ("norm1", "layernorm_before"),
            ("attn.proj", "attention.output.dense"),
            ("norm2", "layernorm_after"),
            ("mlp.fc1", "intermediate.dense"),
            ("mlp.fc2", "output.dense"),
        ]
        .iter()
        .fold(rules, |rules, (from, to)| {
            rules.rename(&block(from), &layer(to))
        })
        .split(&block("attn.qkv"), parts.each_ref().map(|part| &**part), 0)
    }

    /// Residual networks in the layout of torchvision and timm, whose counters of batches are left
    /// out.
    ///
    /// The model's names are those of the files and of `slabwise_models::ResNet`: `conv1.weight`,
    /// `bn1.weight`, `bn1.running_mean`, `layer1.0.conv1.weight`, `layer1.0.bn1.weight`,
    /// `layer2.0.downsample.0.weight`, `layer2.0.downsample.1.weight`, `fc.weight`.
    pub fn resnet() -> Rules {
        Rules::new().ignore("{*layer}.num_batches_tracked")
    }

    /// Residual networks in the layout of Hugging Face's `ResNetForImageClassification`. The model's
    /// names are those of [`Rules::resnet`].
    pub fn resnet_transformers() -> Rules {
        let mut rules = Rules::resnet()
            .rename("resnet.embedder.embedder.convolution.{p}", "conv1.{p}")
            .rename("resnet.embedder.embedder.normalization.{p}", "bn1.{p}")
            .rename("classifier.1.{p}", "fc.{p}");
        // Stages and convolutions are counted from 0 there, from 1 here.
        for stage in 0..4 {
            let from = format!("resnet.encoder.stages.{stage}.layers.{{i}}");
            let to = format!("layer{}.{{i}}", stage + 1);
            for layer in 0..3 {
                let (from, n) = (format!("{from}.layer.{layer}"), layer + 1);
                rules = rules
                    .rename(
                        &format!("{from}.convolution.{{p}}"),
                        &format!("{to}.conv{n}.{{p}}"),
                    )
                    .rename(
                        &format!("{from}.normalization.{{p}}"),
                        &format!("{to}.bn{n}.{{p}}"),
                    );
            }
            let from = format!("{from}.shortcut");
            rules = rules
                .rename(
                    &format!("{from}.convolution.{{p}}"),
                    &format!("{to}.downsample.0.{{p}}"),
                )
                .rename(
                    &format!("{from}.normalization.{{p}}"),
                    &format!("{to}.downsample.1.{{p}}"),
                );
        }
        rules
    }
}

/// The parts of a GPT-2 below `transformer.`.
const GPT2_PARTS: [&str; 4] = ["wte.{p}", "wpe.{p}", "h.{i}.{*rest}", "ln_f.{p}"];

fn gpt2_layers() -> Rules {
    let block = |part: &str| format!("transformer.h.{{i}}.{part}");
    [
        "attn.c_attn.weight",
        "attn.c_proj.weight",
        "mlp.c_fc.weight",
        "mlp.c_proj.weight",
    ]
    .iter()
    .fold(Rules::new(), |rules, part| rules.transpose(&block(part)))
    .ignore(&block("attn.bias"))
    .ignore(&block("attn.masked_bias"))
    .tied("lm_head.weight", "transformer.wte.weight")
}

/// The names of decoders in llama.cpp's files.
fn decoder_gguf() -> Rules {
    let rules = Rules::new()
        .ignore("rope_freqs.weight")
        .ignore("rope_factors_long.weight")
        .ignore("rope_factors_short.weight")
        .ignore("blk.{i}.attn_rot_embd.weight")
        .rename("token_embd.weight", "model.embed_tokens.weight")
        .rename("output_norm.weight", "model.norm.weight")
        .rename("output.weight", "lm_head.weight");
    let names = [
        ("attn_norm", "input_layernorm"),
        ("attn_q", "self_attn.q_proj"),
        ("attn_k", "self_attn.k_proj"),
        ("attn_v", "self_attn.v_proj"),
        ("attn_output", "self_attn.o_proj"),
        ("ffn_norm", "post_attention_layernorm"),
        ("ffn_gate", "mlp.gate_proj"),
        ("ffn_up", "mlp.up_proj"),
        ("ffn_down", "mlp.down_proj"),
    ];
    let renamed = names.iter().fold(rules, |rules, (file, model)| {
        let layer = format!("model.layers.{{i}}.{model}.weight");
        rules.rename(&format!("blk.{{i}}.{file}.weight"), &layer)
    });
    renamed.tied("lm_head.weight", "model.embed_tokens.weight")
}

/// A BERT whose names begin with `prefix`, and in some files with `other` instead.
fn bert_parts(other: &str, prefix: &str) -> Rules {
    ["embeddings", "encoder", "pooler"]
        .iter()
        .fold(Rules::new(), |rules, part| {
            rules.alias(
                &format!("{other}{part}.{{*rest}}"),
                &format!("{prefix}{part}.{{*rest}}"),
            )
        })
        .alias("{*layer}.LayerNorm.gamma", "{*layer}.LayerNorm.weight")
        .alias("{*layer}.LayerNorm.beta", "{*layer}.LayerNorm.bias")
        .ignore(&format!("{prefix}embeddings.position_ids"))
        .tied("cls.predictions.decoder.bias", "cls.predictions.bias")
        .ignore_extra(&format!("{prefix}pooler.{{*rest}}"))
        .ignore_extra("cls.{*rest}")
}
