//! The sizes of a [`Llama`] in the metadata of a GGUF file.

use slabwise::tensor::{Rope, RopeScaling};
use slabwise::weights::{Rules, Weights, WeightsError};

use super::Llama;

/// The tensor of a GGUF file with the factors of rotary frequencies.
const FACTORS: &str = "rope_freqs.weight";

/// The metadata key of a model's architecture, and those that are read.
const ARCHITECTURE: &str = "general.architecture";
const ARCHITECTURES: [&str; 3] = ["llama", "qwen2", "qwen3"];

impl Llama {
    /// The sizes of a model of the architecture `llama`, `qwen2` or `qwen3` in a GGUF file, from
    /// its metadata.
    ///
    /// ```no_run
    /// # use slabwise::prelude::*;
    /// # use slabwise_models::Llama;
    /// use slabwise::Quantization;
    /// use slabwise::weights::Weights;
    ///
    /// let weights = Weights::open("model-Q4_0.gguf")?;
    /// let sizes = Llama::of_gguf(&weights)?;
    /// let params = Params::seeded(0);
    /// let four_bits = params.root().quantized(Quantization { bits: 4, block: 32 });
    /// let decoder = sizes.layers(&four_bits);
    /// let mut session = Session::new(Device::Cpu, params)?;
    /// session.load_from(&weights, &sizes.gguf_rules(&weights))?;
    /// # Ok::<(), slabwise::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`WeightsError::Unsupported`] if a size is missing or the model is one that [`Llama`] does
    /// not compute: of another architecture, with keys and values of different widths, or with
    /// frequencies scaled neither linearly nor as those of Llama 3.1.
    pub fn of_gguf(weights: &Weights) -> Result<Llama, WeightsError> {
        let metadata = weights.metadata();
        let unsupported = |detail: String| WeightsError::Unsupported {
            path: weights.path().to_owned(),
            detail,
        };
        let text = |key: &str| metadata.get(key).map(String::as_str);
        let architecture = text(ARCHITECTURE).unwrap_or("missing");
        if !ARCHITECTURES.contains(&architecture) {
            let detail = format!("{ARCHITECTURE} is {architecture}, not llama, qwen2 or qwen3");
            return Err(unsupported(detail));
        }
        let own = |key: &str| format!("{architecture}.{key}");
        let number = |key: &str| text(key).and_then(|text| text.parse::<f64>().ok());
        let size = |key: &str| {
            let key = own(key);
            let size = number(&key).filter(|n| n.fract() == 0.0 && (1.0..1e9).contains(n));
            let said = || format!("{key} is {}, not a size", text(&key).unwrap_or("missing"));
            size.map(|n| n as usize).ok_or_else(|| unsupported(said()))
        };
        let named = |wanted: &str| weights.names().find(|(name, ..)| *name == wanted);
        let vocabulary = match named("token_embd.weight") {
            Some((_, _, &[tokens, _])) => tokens as usize,
            _ => return Err(unsupported("token_embd.weight is not a matrix".into())),
        };
        let heads = size("attention.head_count")?;
        let (width, of_keys) = (size("embedding_length")?, "attention.head_count_kv");
        let base = number(&own("rope.freq_base")).unwrap_or(1e4);
        let eps = number(&own("attention.layer_norm_rms_epsilon")).unwrap_or(1e-5);
        // The width of a head has three keys, each of which may be missing.
        let widths = [
            "attention.key_length",
            "attention.value_length",
            "rope.dimension_count",
        ];
        let present = widths.into_iter().find(|key| text(&own(key)).is_some());
        let each = match present {
            Some(key) => size(key)?,
            None => width / heads,
        };
        if present.is_none() && !width.is_multiple_of(heads) {
            let (key, width) = (own("attention.head_count"), own("embedding_length"));
            let detail = format!("{key} is {heads}, which does not divide {width}");
            return Err(unsupported(detail));
        }
        for key in widths.map(own) {
            if let Some(found) = text(&key).filter(|&found| found != each.to_string()) {
                let detail = format!("{key} is {found}, and heads of the width {each} are read");
                return Err(unsupported(detail));
            }
        }
        let sizes = Llama {
            layers: size("block_count")?,
            width,
            heads,
            key_heads: match text(&own(of_keys)) {
                Some(_) => size(of_keys)?,
                None => heads,
            },
            head_width: Some(each).filter(|_| each * heads != width),
            biases: named("blk.0.attn_q.bias").is_some(),
            head_norms: named("blk.0.attn_q_norm.weight").is_some(),
            window: None,
            inner: size("feed_forward_length")?,
            length: size("context_length")?,
            vocabulary,
            tied: named("output.weight").is_none(),
            base: base as f32,
            scaling: RopeScaling::None,
            eps: eps as f32,
        };
        let last = format!("blk.{}.attn_norm.weight", sizes.layers - 1);
        if named(&last).is_none() {
            let detail = format!(
                "{} is {}, and there is no {last}",
                own("block_count"),
                sizes.layers
            );
            return Err(unsupported(detail));
        }
        // The older key, and the one that a type belongs to. Without a type it is the linear one.
        let [of_type, of_factor] = ["rope.scaling.type", "rope.scaling.factor"].map(own);
        let factor = number(&of_factor).or_else(|| number(&own("rope.scale_linear")));
        let linear = match (text(&of_type), factor) {
            (Some("none"), _) | (None | Some("linear"), None) => None,
            (None | Some("linear"), Some(factor)) if factor > 0.0 => {
                Some(factor as f32).filter(|&factor| factor != 1.0)
            }
            (None | Some("linear"), Some(factor)) => {
                return Err(unsupported(format!("{of_factor} is {factor}, not above 0")));
            }
            (Some(scaling), _) => {
                let detail = format!(
                    "{of_type} is {scaling}, and only linear scaling and the factors of Llama 3.1 are read"
                );
                return Err(unsupported(detail));
            }
        };
        let by_factors = match weights.read(FACTORS)? {
            Some(bytes) => sizes.scaling_of(&bytes).ok_or_else(|| {
                let detail = "the factors of rope_freqs.weight are not those of Llama 3.1";
                unsupported(detail.into())
            })?,
            None => RopeScaling::None,
        };
        let scaling = match (by_factors, linear) {
            (scaling, None) => scaling,
            (RopeScaling::None, Some(factor)) => RopeScaling::Linear(factor),
            (_, Some(factor)) => {
                let detail = format!("{of_factor} is {factor}, beside factors of frequencies");
                return Err(unsupported(detail));
            }
        };
        Ok(Llama { scaling, ..sizes })
    }

    /// The rules for the names of the GGUF file that [`Llama::of_gguf`] has read these sizes from.
    pub fn gguf_rules(&self, weights: &Weights) -> Rules {
        match weights.metadata().get(ARCHITECTURE).map(String::as_str) {
            Some("qwen2" | "qwen3") => Rules::qwen_gguf(),
            _ => Rules::llama_gguf(self.heads, self.key_heads),
        }
    }

    /// The scaling that divides the frequencies by factors of f32, if it is that of Llama 3.1, whose
    /// parameters a GGUF file does not have.
    fn scaling_of(&self, factors: &[u8]) -> Option<RopeScaling> {
        let (factors, rest) = factors.as_chunks::<4>();
        let factors: Vec<f32> = factors.iter().map(|&b| f32::from_le_bytes(b)).collect();
        if !rest.is_empty() || factors.len() != self.each() / 2 {
            return None;
        }
        let factor = factors.iter().copied().fold(1.0, f32::max);
        let scaling = match factor > 1.0 {
            // The frequencies that turn least are divided by the whole factor.
            true => RopeScaling::Llama3 {
                factor,
                low: 1.0,
                high: 4.0,
                original: 8192,
            },
            false => RopeScaling::None,
        };
        let rope = Rope::new(self.each()).base(self.base);
        let ((plain, _), (scaled, _)) = (rope.frequencies(), rope.scaling(scaling).frequencies());
        let near = |((&plain, &scaled), &factor): ((&f32, &f32), &f32)| {
            (plain / scaled - factor).abs() <= 1e-4 * factor
        };
        let all = plain.iter().zip(&scaled).zip(&factors).all(near);
        all.then_some(scaling)
    }
}
