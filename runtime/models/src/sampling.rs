//! The choice of the next token.

use slabwise::tensor::Tensor;
use slabwise::trace::Key;

/// The temperature below which the likeliest token is chosen, because logits divided by less may be
/// infinite.
const COLD: f32 = 1e-30;

/// The choice of a token by its logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    temperature: f32,
    top_k: Option<usize>,
    top_p: Option<f32>,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling::new()
    }
}

impl Sampling {
    /// Any token, with the probability that the logits give it.
    pub fn new() -> Self {
        Sampling {
            temperature: 1.0,
            top_k: None,
            top_p: None,
        }
    }

    /// With logits divided by this, at least 0: below 1 likely tokens become likelier. 0, and any
    /// number below 10⁻³⁰, chooses the likeliest.
    pub fn temperature(mut self, temperature: f32) -> Self {
        self.temperature = temperature;
        self
    }

    /// Among the `k` likeliest tokens, at least one.
    pub fn top_k(mut self, k: usize) -> Self {
        self.top_k = Some(k);
        self
    }

    /// Among the likeliest tokens that have this probability together (Holtzman et al. 2020), above 0
    /// and at most 1, at the temperature and among those of [`Sampling::top_k`].
    pub fn top_p(mut self, p: f32) -> Self {
        self.top_p = Some(p);
        self
    }

    /// A token (i32) for each row of logits `[n, vocabulary]`. In a trace for
    /// [sampling](slabwise::Trace::sampling) it is another one in each run.
    #[track_caller]
    pub fn of<'t>(self, logits: Tensor<'t>) -> Tensor<'t> {
        match self.fault() {
            Some(why) => logits.mistake(why),
            None => match self.allowed(logits) {
                Some(logits) => logits.trace().categorical(logits, 1),
                None => logits.argmax(1),
            },
        }
    }

    /// [`Sampling::of`] by the numbers of a key.
    #[track_caller]
    pub fn by<'t>(self, key: Key<'t>, logits: Tensor<'t>) -> Tensor<'t> {
        match self.fault() {
            Some(why) => logits.mistake(why),
            None => match self.allowed(logits) {
                Some(logits) => key.categorical(logits, 1),
                None => logits.argmax(1),
            },
        }
    }

    /// The mistake in its numbers, if there is one.
    fn fault(self) -> Option<String> {
        let temperature = self.temperature;
        if !(temperature.is_finite() && temperature >= 0.0) {
            return Some(format!(
                "sampling: temperature({temperature}) is not a finite number from 0 on; 0 chooses the likeliest token"
            ));
        }
        if self.top_k == Some(0) {
            return Some("sampling: top_k(0) allows no token; leave it out to allow all".into());
        }
        let p = self.top_p.filter(|p| !(*p > 0.0 && *p <= 1.0))?;
        Some(format!(
            "sampling: top_p({p}) is not a probability above 0 and at most 1; 1 allows all tokens"
        ))
    }

    /// The logits at the temperature, −∞ where a token is excluded; none if the likeliest token is
    /// chosen.
    #[track_caller]
    fn allowed<'t>(self, logits: Tensor<'t>) -> Option<Tensor<'t>> {
        if self.temperature < COLD || self.top_k == Some(1) {
            return None;
        }
        let logits = logits * (1.0 / self.temperature);
        if self.top_k.is_none() && self.top_p.is_none() {
            return Some(logits);
        }
        let all = logits.len(1);
        let Some(k) = self.top_k.or(all) else {
            return Some(logits.mistake(format!(
                "sampling of {logits:?}: top_p needs logits [n, vocabulary] of a fixed vocabulary"
            )));
        };
        let k = k.clamp(1, all.unwrap_or(usize::MAX).max(1));
        // The likeliest first; a token less likely than the last one allowed is excluded.
        let (mut sorted, _) = logits.topk(k, 1);
        if let Some(p) = self.top_p {
            let shares = sorted.softmax(1);
            // The first is always allowed.
            let before = shares.cumsum(1) - shares;
            let first = sorted.trace().arange(k).equal(0);
            sorted = before.lt(p).or(first).select(sorted, f32::INFINITY);
        }
        let least = sorted.min_keep(1);
        Some(logits.ge(least).select(logits, f32::NEG_INFINITY))
    }
}
