//! The sizes of a [`Llama`] in the `config.json` of a folder from the Hugging Face hub.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use slabwise::tensor::RopeScaling;
use slabwise::weights::WeightsError;

use super::Llama;

/// The most bytes of a configuration; published ones have some thousand.
const BYTES_MAX: u64 = 1 << 24;

/// The most blocks, and the largest of the other sizes.
const LAYERS_MAX: usize = 1000;
const SIZE_MAX: usize = 1 << 24;
const LENGTH_MAX: usize = 1 << 30;

/// The architectures that are read.
#[derive(Clone, Copy, PartialEq)]
enum Architecture {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
}

const ARCHITECTURES: [(&str, Architecture); 4] = [
    ("LlamaForCausalLM", Architecture::Llama),
    ("MistralForCausalLM", Architecture::Mistral),
    ("Qwen2ForCausalLM", Architecture::Qwen2),
    ("Qwen3ForCausalLM", Architecture::Qwen3),
];

impl Llama {
    /// The sizes of a model of the Hugging Face hub, from the `config.json` of its folder, or from
    /// a file in that format. Architectures are `LlamaForCausalLM`, `MistralForCausalLM`,
    /// `Qwen2ForCausalLM` and `Qwen3ForCausalLM`. The weights beside it are those of
    /// [`Rules::llama`](slabwise::weights::Rules::llama).
    ///
    /// ```no_run
    /// # use slabwise::prelude::*;
    /// # use slabwise_models::Llama;
    /// use slabwise::weights::{Rules, Weights};
    ///
    /// let sizes = Llama::of_config("Qwen2.5-0.5B")?;
    /// let params = Params::seeded(0);
    /// let decoder = sizes.layers(&params.root());
    /// let mut session = Session::new(Device::Cpu, params)?;
    /// session.load_from(&Weights::open("Qwen2.5-0.5B")?, &Rules::llama())?;
    /// # Ok::<(), slabwise::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`WeightsError::Read`] and [`WeightsError::Malformed`] if the file cannot be read or is not
    /// JSON; [`WeightsError::Unsupported`], with the key, its value and the supported ones, if a
    /// size is missing or out of range, or the model is one that [`Llama`] does not compute.
    pub fn of_config(folder: impl AsRef<Path>) -> Result<Llama, WeightsError> {
        let (path, values) = read(folder.as_ref(), "config.json")?;
        let top = Part {
            path: &path,
            within: "",
            values: &values,
        };
        let architecture = architecture(&top)?;
        let qwen = matches!(architecture, Architecture::Qwen2 | Architecture::Qwen3);
        top.only("hidden_act", "silu")?;
        top.off("mlp_bias")?;
        top.off("quantization_config")?;
        // Qwen2 has biases, whether the key is there or not.
        if architecture != Architecture::Qwen2 {
            top.off("attention_bias")?;
        }
        if qwen {
            top.off("use_sliding_window")?;
        }
        top.full_layers()?;
        let (width, length) = (
            top.size("hidden_size", SIZE_MAX)?,
            top.size("max_position_embeddings", LENGTH_MAX)?,
        );
        let heads = top.size("num_attention_heads", SIZE_MAX)?;
        let key_heads = match top.get("num_key_value_heads") {
            None if architecture == Architecture::Llama => heads,
            _ => top.size("num_key_value_heads", SIZE_MAX)?,
        };
        if !heads.is_multiple_of(key_heads) {
            let supported = format!("a divisor of num_attention_heads ({heads})");
            return Err(top.refused("num_key_value_heads", &supported));
        }
        let each = top.head_width(architecture, width, heads)?;
        let (base, scaling) = top.rotary(architecture)?;
        Ok(Llama {
            layers: top.size("num_hidden_layers", LAYERS_MAX)?,
            width,
            heads,
            key_heads,
            head_width: Some(each).filter(|each| each * heads != width),
            biases: architecture == Architecture::Qwen2,
            head_norms: architecture == Architecture::Qwen3,
            window: match architecture {
                Architecture::Mistral => top.window()?.filter(|&window| window < length),
                _ => None,
            },
            inner: top.size("intermediate_size", SIZE_MAX)?,
            length,
            vocabulary: top.size("vocab_size", SIZE_MAX)?,
            tied: top.flag("tie_word_embeddings")?,
            base,
            scaling,
            eps: top.number("rms_norm_eps", 1e-12..=0.1)? as f32,
        })
    }

    /// The tokens that end a text: `eos_token_id`, a number or several, of `generation_config.json`
    /// and of `config.json` in a folder from the Hugging Face hub; none if neither has it.
    ///
    /// # Errors
    /// As [`Llama::of_config`]; a missing `generation_config.json` is none.
    pub fn end_tokens(folder: impl AsRef<Path>) -> Result<Vec<i32>, WeightsError> {
        let mut ends = Vec::new();
        for name in ["generation_config.json", "config.json"] {
            let (path, values) = match read(folder.as_ref(), name) {
                Err(WeightsError::Read { source, .. })
                    if source.kind() == ErrorKind::NotFound && name != "config.json" =>
                {
                    continue;
                }
                read => read?,
            };
            let part = Part {
                path: &path,
                within: "",
                values: &values,
            };
            let several = match part.get("eos_token_id") {
                None => &[],
                Some(Value::Array(several)) => several.as_slice(),
                Some(one) => std::slice::from_ref(one),
            };
            for token in several {
                let token = token.as_u64().and_then(|token| i32::try_from(token).ok());
                let supported = "a token, a list of tokens, or null";
                let token = token.ok_or_else(|| part.refused("eos_token_id", supported))?;
                if !ends.contains(&token) {
                    ends.push(token);
                }
            }
        }
        Ok(ends)
    }
}

/// The object in a file of a folder, or in the file itself if `at` is one.
fn read(at: &Path, name: &str) -> Result<(PathBuf, Map<String, Value>), WeightsError> {
    let path = match at.is_file() {
        true => at.to_owned(),
        false => at.join(name),
    };
    let failed = |source: io::Error| WeightsError::Read {
        path: path.clone(),
        source,
    };
    let mut text = String::new();
    let file = File::open(&path).map_err(failed)?;
    file.take(BYTES_MAX + 1)
        .read_to_string(&mut text)
        .map_err(failed)?;
    let malformed = |detail: String| WeightsError::Malformed {
        path: path.clone(),
        format: "JSON",
        detail,
    };
    if text.len() as u64 > BYTES_MAX {
        return Err(malformed(format!("it has more than {BYTES_MAX} bytes")));
    }
    match serde_json::from_str(&text) {
        Ok(Value::Object(values)) => Ok((path, values)),
        Ok(_) => Err(malformed("it is not an object".into())),
        Err(error) => Err(malformed(error.to_string())),
    }
}

fn architecture(top: &Part<'_>) -> Result<Architecture, WeightsError> {
    let name = match top.get("architectures") {
        Some(Value::Array(names)) if names.len() == 1 => names[0].as_str(),
        _ => None,
    };
    let known = ARCHITECTURES
        .iter()
        .find(|&&(known, _)| name == Some(known));
    known.map(|&(_, architecture)| architecture).ok_or_else(|| {
        let names = ARCHITECTURES.map(|(name, _)| format!("[{name:?}]"));
        top.refused("architectures", &format!("one of {}", names.join(", ")))
    })
}

/// An object of a file.
struct Part<'a> {
    path: &'a Path,
    /// The start of the names of its keys in errors: empty, or the object's key and a dot.
    within: &'a str,
    values: &'a Map<String, Value>,
}

impl Part<'_> {
    /// A value that is neither missing nor null.
    fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key).filter(|value| !value.is_null())
    }

    /// The error of a value, which may be missing.
    fn refused(&self, key: &str, supported: &str) -> WeightsError {
        let value = match self.values.get(key) {
            None => "missing".into(),
            Some(value) => {
                let text = value.to_string();
                match text.char_indices().nth(80) {
                    Some((end, _)) => format!("{}…", &text[..end]),
                    None => text,
                }
            }
        };
        WeightsError::Unsupported {
            path: self.path.to_owned(),
            detail: format!("{}{key} is {value}; supported is {supported}", self.within),
        }
    }

    fn size(&self, key: &str, most: usize) -> Result<usize, WeightsError> {
        let size = self.get(key).and_then(Value::as_u64);
        let size = size.and_then(|size| usize::try_from(size).ok());
        size.filter(|size| (1..=most).contains(size))
            .ok_or_else(|| self.refused(key, &format!("a whole number from 1 to {most}")))
    }

    fn number(&self, key: &str, range: RangeInclusive<f64>) -> Result<f64, WeightsError> {
        let number = self.get(key).and_then(Value::as_f64);
        number
            .filter(|number| range.contains(number))
            .ok_or_else(|| {
                let (from, to) = range.into_inner();
                self.refused(key, &format!("a number from {from} to {to}"))
            })
    }

    /// A truth value; false unless given.
    fn flag(&self, key: &str) -> Result<bool, WeightsError> {
        match self.get(key) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(_) => Err(self.refused(key, "true or false")),
        }
    }

    /// Fails unless a value is missing, null or false.
    fn off(&self, key: &str) -> Result<(), WeightsError> {
        match self.get(key) {
            None | Some(Value::Bool(false)) => Ok(()),
            Some(_) => Err(self.refused(key, "false, or no such key")),
        }
    }

    /// Fails unless a value is this text.
    fn only(&self, key: &str, supported: &str) -> Result<(), WeightsError> {
        match self.get(key).and_then(Value::as_str) == Some(supported) {
            true => Ok(()),
            false => Err(self.refused(key, &format!("{supported:?}"))),
        }
    }

    /// Fails if blocks are listed, one of which does not attend to all positions.
    fn full_layers(&self) -> Result<(), WeightsError> {
        const FULL: &str = "full_attention";
        let full = match self.get("layer_types") {
            None => true,
            Some(Value::Array(kinds)) => kinds.iter().all(|kind| kind == FULL),
            Some(_) => false,
        };
        full.then_some(())
            .ok_or_else(|| self.refused("layer_types", &format!("{FULL:?} for each layer")))
    }

    /// The width of a head, which rotary positions halve.
    fn head_width(
        &self,
        architecture: Architecture,
        width: usize,
        heads: usize,
    ) -> Result<usize, WeightsError> {
        // Those of Qwen3 do not follow from the other sizes.
        if self.get("head_dim").is_some() || architecture == Architecture::Qwen3 {
            let each = self.size("head_dim", 1 << 16)?;
            return match each.is_multiple_of(2) {
                true => Ok(each),
                false => Err(self.refused("head_dim", "an even number")),
            };
        }
        match width.is_multiple_of(2 * heads) {
            true => Ok(width / heads),
            false => {
                let supported = format!(
                    "a number that divides hidden_size ({width}) into heads of an even width, or head_dim beside it"
                );
                Err(self.refused("num_attention_heads", &supported))
            }
        }
    }

    /// The positions that a token of a Mistral attends to, if they are limited.
    fn window(&self) -> Result<Option<usize>, WeightsError> {
        match self.values.get("sliding_window") {
            // The default of transformers, which writes null for none.
            None => Ok(Some(4096)),
            Some(Value::Null) => Ok(None),
            Some(_) => self.size("sliding_window", LENGTH_MAX).map(Some),
        }
    }

    /// The base of the rotary positions and the change of their frequencies. Older files have
    /// `rope_theta` and `rope_scaling`, newer ones both in `rope_parameters`; where a file has
    /// several of them, they say the same.
    fn rotary(&self, architecture: Architecture) -> Result<(f32, RopeScaling), WeightsError> {
        self.whole_heads()?;
        let mut found: Option<RopeScaling> = None;
        let mut base = None;
        if self.get("rope_theta").is_some() {
            base = Some(self.base()?);
        }
        for (key, within) in [
            ("rope_parameters", "rope_parameters."),
            ("rope_scaling", "rope_scaling."),
        ] {
            let values = match self.get(key) {
                None => continue,
                Some(Value::Object(values)) => values,
                Some(_) => return Err(self.refused(key, "an object, or null")),
            };
            let part = Part {
                path: self.path,
                within,
                values,
            };
            part.whole_heads()?;
            if part.get("rope_theta").is_some() {
                let own = part.base()?;
                if base.is_some_and(|base| base != own) {
                    return Err(part.refused("rope_theta", "that of the other rope_theta"));
                }
                base = Some(own);
            }
            let scaling = part.scaling()?;
            if found.is_some_and(|found| found != scaling) {
                return Err(self.refused(key, "that of rope_parameters"));
            }
            found = Some(scaling);
        }
        let base = match base {
            Some(base) => base,
            // The first files had no key.
            None if architecture == Architecture::Llama => 1e4,
            None => self.base()?,
        };
        Ok((base, found.unwrap_or_default()))
    }

    fn base(&self) -> Result<f32, WeightsError> {
        Ok(self.number("rope_theta", 2.0..=1e12)? as f32)
    }

    /// Fails if a part of a head is not rotated.
    fn whole_heads(&self) -> Result<(), WeightsError> {
        const KEY: &str = "partial_rotary_factor";
        match self.get(KEY).is_none_or(|part| part.as_f64() == Some(1.0)) {
            true => Ok(()),
            false => Err(self.refused(KEY, "1")),
        }
    }

    /// The change of frequencies that an object describes, by its newer or older key.
    fn scaling(&self) -> Result<RopeScaling, WeightsError> {
        const SUPPORTED: &str = "\"default\", \"linear\" or \"llama3\"";
        let key = match self.get("rope_type").is_some() || self.get("type").is_none() {
            true => "rope_type",
            false => "type",
        };
        let factor = || Ok(self.number("factor", 1.0..=1e6)? as f32);
        match self.get(key).and_then(Value::as_str) {
            Some("default") => Ok(RopeScaling::None),
            Some("linear") => Ok(RopeScaling::Linear(factor()?)),
            Some("llama3") => {
                let [low, high] = ["low_freq_factor", "high_freq_factor"]
                    .map(|key| Ok(self.number(key, 1e-3..=1e6)? as f32));
                let (low, high) = (low?, high?);
                if low >= high {
                    let supported = format!("a number above low_freq_factor ({low})");
                    return Err(self.refused("high_freq_factor", &supported));
                }
                Ok(RopeScaling::Llama3 {
                    factor: factor()?,
                    low,
                    high,
                    original: self.size("original_max_position_embeddings", LENGTH_MAX)?,
                })
            }
            _ => Err(self.refused(key, SUPPORTED)),
        }
    }
}
