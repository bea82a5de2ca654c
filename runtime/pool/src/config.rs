//! The settings of a pool: fields of a struct, or variables of the environment. The struct takes
//! precedence.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use slabwise_planner::{Bytes, brief};

/// The policy by which a pool finds memory for a request. Each imitates an allocator in use, so
/// that they can be compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Policy {
    /// Two-level segregated fit (Masmano et al., 2004) with 32 lists for each power of two, a
    /// bounded best-fit scan within a list, immediate coalescing, and pages for small blocks.
    #[default]
    Tlsf,
    /// XLA's best fit with coalescing, which JAX uses on GPUs: 21 bins of 256·2ᵇ bytes, the
    /// smallest block that fits, split if it is at least twice the request or 128 MiB would be
    /// left.
    Bfc,
    /// MXNet's `Naive`: requests rounded up to a page, above 2 MiB to 2 MiB; blocks of exactly that
    /// size are kept and never split.
    Naive,
    /// MXNet's `Round`: requests rounded up to a power of two, above the cutoff to a multiple of
    /// it; blocks are never split.
    Round,
    /// MXNet's `Unpooled`: each request is a driver call, each free another, once the stream is
    /// done with the block.
    Unpooled,
    /// JAX's `platform` allocator: as `unpooled`, but a free synchronizes with the device as
    /// `cudaFree` does, and no fraction limits it.
    Platform,
    /// JAX's `cuda_async`: the driver's own stream-ordered pool; nothing is kept here.
    Async,
    /// PyTorch's expandable segments: the lists of `tlsf` over one address range, to which memory
    /// is mapped page by page, and in which pages of free blocks are remapped instead of copying
    /// blocks.
    Vmm,
}

impl Policy {
    /// All of them.
    pub const ALL: [Policy; 8] = [
        Policy::Tlsf,
        Policy::Bfc,
        Policy::Naive,
        Policy::Round,
        Policy::Unpooled,
        Policy::Platform,
        Policy::Async,
        Policy::Vmm,
    ];

    /// Its name, as users write it.
    pub fn name(self) -> &'static str {
        match self {
            Policy::Tlsf => "tlsf",
            Policy::Bfc => "bfc",
            Policy::Naive => "naive",
            Policy::Round => "round",
            Policy::Unpooled => "unpooled",
            Policy::Platform => "platform",
            Policy::Async => "async",
            Policy::Vmm => "vmm",
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Policy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Policy::ALL
            .into_iter()
            .find(|p| p.name() == text)
            .ok_or_else(|| {
                format!(
                    "unknown policy {:?}; there are {}",
                    brief(text),
                    names(&Policy::ALL)
                )
            })
    }
}

fn names(policies: &[Policy]) -> String {
    policies
        .iter()
        .map(|p| p.name())
        .collect::<Vec<_>>()
        .join(", ")
}

/// An invalid setting.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name} is {:?}; it is {expected}", brief(value))]
pub struct ConfigError {
    /// The variable, or the field.
    pub name: &'static str,
    /// Its value.
    pub value: String,
    /// The values allowed.
    pub expected: String,
}

/// The user's settings of a pool; a field that is `None` is read from the environment, else it has
/// its default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MemoryConfig {
    /// `SLABWISE_ALLOCATOR` (`pool`, `platform`, `async`, `vmm`) and `SLABWISE_POOL` (`tlsf`,
    /// `bfc`, `naive`, `round`, `unpooled`) together determine the policy; `tlsf` by default.
    pub policy: Option<Policy>,
    /// `SLABWISE_PREALLOCATE`: whether the pool reserves all its memory at the first use. Devices
    /// do by default, the host does not.
    pub preallocate: Option<bool>,
    /// `SLABWISE_MEM_FRACTION`: the fraction of the device's total memory that the pool may
    /// reserve, above 0 and at most 1; 0.75 by default.
    pub fraction: Option<f64>,
    /// The most bytes that the pool may take, independent of the fraction.
    pub limit: Option<u64>,
    /// `SLABWISE_POOL_PAGE_SIZE`: bytes that `naive` and `round` round up to at least, a power of
    /// two; 4096 by default.
    pub page_size: Option<u64>,
    /// `SLABWISE_POOL_ROUND_CUTOFF`: requests up to 2 to this power are rounded up to powers of two
    /// by `round`; 20 to 34, 24 by default.
    pub round_cutoff: Option<u32>,
    /// `SLABWISE_POOL_RESERVE`: percent of the device's memory that `naive` and `round` leave free
    /// while they hold unused blocks; 0 to 100, 5 by default.
    pub reserve: Option<u32>,
    /// Whether blocks are moved when a request would fail otherwise; they are by default.
    pub defragment: Option<bool>,
    /// Bytes that may be moved for each byte allocated, beyond one pool's worth; 1 by default.
    pub defragment_rate: Option<f64>,
    /// Blocks unused for this long are returned to the driver. Never by default.
    pub idle_time: Option<Duration>,
    /// Blocks unused for this many steps are returned to the driver. Never by default.
    pub idle_steps: Option<u64>,
}

/// All settings, with the defaults of those not made.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Settings {
    pub policy: Policy,
    pub preallocate: Option<bool>,
    pub fraction: f64,
    pub limit: Option<u64>,
    pub page_size: u64,
    pub round_cutoff: u32,
    pub reserve: u32,
    pub defragment: bool,
    pub defragment_rate: f64,
    pub idle_time: Option<Duration>,
    pub idle_steps: Option<u64>,
}

impl MemoryConfig {
    /// A configuration with this policy, overriding the environment.
    pub fn with_policy(policy: Policy) -> MemoryConfig {
        MemoryConfig {
            policy: Some(policy),
            ..MemoryConfig::default()
        }
    }

    /// The variables of the environment that set the fields left open.
    pub const VARIABLES: [&str; 7] = [
        "SLABWISE_ALLOCATOR",
        "SLABWISE_POOL",
        "SLABWISE_PREALLOCATE",
        "SLABWISE_MEM_FRACTION",
        "SLABWISE_POOL_PAGE_SIZE",
        "SLABWISE_POOL_ROUND_CUTOFF",
        "SLABWISE_POOL_RESERVE",
    ];

    /// The configuration with every field filled in from the environment or a default. The fields
    /// still `None` are those that the device decides, and limits that were not set.
    ///
    /// # Errors
    /// If a variable or a field is invalid; the error names it.
    pub fn resolve(&self) -> Result<MemoryConfig, ConfigError> {
        self.resolved(variable)
    }

    fn resolved(
        &self,
        lookup: impl Fn(&str) -> Option<String>,
    ) -> Result<MemoryConfig, ConfigError> {
        let s = self.settings(lookup)?;
        Ok(MemoryConfig {
            policy: Some(s.policy),
            preallocate: s.preallocate,
            fraction: Some(s.fraction),
            limit: s.limit,
            page_size: Some(s.page_size),
            round_cutoff: Some(s.round_cutoff),
            reserve: Some(s.reserve),
            defragment: Some(s.defragment),
            defragment_rate: Some(s.defragment_rate),
            idle_time: s.idle_time,
            idle_steps: s.idle_steps,
        })
    }

    /// The configuration of the environment and the defaults, without invalid variables; and the
    /// errors of those.
    pub fn survey() -> (MemoryConfig, Vec<ConfigError>) {
        let none = MemoryConfig::default();
        let only = |name: &'static str| {
            none.settings(|asked| if asked == name { variable(asked) } else { None })
        };
        let mistakes: Vec<ConfigError> = Self::VARIABLES
            .iter()
            .filter_map(|name| only(name).err())
            .collect();
        let sound = |name: &str| mistakes.iter().all(|mistake| mistake.name != name);
        let config = none
            .resolved(|name| if sound(name) { variable(name) } else { None })
            .unwrap_or_default();
        (config, mistakes)
    }

    /// Fills unset fields from environment variables, read through `lookup`.
    ///
    /// # Errors
    /// If a variable or a field is invalid. A variable that a field overrides is not read.
    pub(crate) fn settings(
        &self,
        lookup: impl Fn(&str) -> Option<String>,
    ) -> Result<Settings, ConfigError> {
        let policy = match self.policy {
            Some(policy) => policy,
            None => policy_of(&lookup)?,
        };
        let fraction = setting(
            self.fraction,
            &lookup,
            "SLABWISE_MEM_FRACTION",
            0.75,
            "a number above 0 and at most 1",
            |f: &f64| *f > 0.0 && *f <= 1.0,
        )?;
        let preallocate = match (self.preallocate, lookup("SLABWISE_PREALLOCATE")) {
            (Some(set), _) => Some(set),
            (None, None) => None,
            (None, Some(text)) => match text.trim().to_ascii_lowercase().as_str() {
                "1" | "true" | "yes" | "on" => Some(true),
                "0" | "false" | "no" | "off" => Some(false),
                _ => return Err(wrong("SLABWISE_PREALLOCATE", text, "true or false")),
            },
        };
        let page = lookup("SLABWISE_POOL_PAGE_SIZE");
        let expected = "a power of two from 256 B to 1 GiB";
        let page_size = match (self.page_size, page) {
            (Some(bytes), _) => bytes,
            (None, None) => 4096,
            (None, Some(text)) => {
                text.parse::<Bytes>()
                    .map_err(|_| wrong("SLABWISE_POOL_PAGE_SIZE", text, expected))?
                    .0
            }
        };
        if !page_size.is_power_of_two() || !(256..=1 << 30).contains(&page_size) {
            return Err(wrong(
                "SLABWISE_POOL_PAGE_SIZE",
                page_size.to_string(),
                expected,
            ));
        }
        let cutoff = |n: &u32| (20..=34).contains(n);
        let at_most_100 = |n: &u32| *n <= 100;
        let round_cutoff = setting(
            self.round_cutoff,
            &lookup,
            "SLABWISE_POOL_ROUND_CUTOFF",
            24,
            "a whole number from 20 to 34",
            cutoff,
        )?;
        let reserve = setting(
            self.reserve,
            &lookup,
            "SLABWISE_POOL_RESERVE",
            5,
            "a whole percentage from 0 to 100",
            at_most_100,
        )?;
        let defragment_rate = self.defragment_rate.unwrap_or(1.0);
        if !(0.0..=1e6).contains(&defragment_rate) {
            return Err(wrong(
                "defragment_rate",
                defragment_rate.to_string(),
                "a number from 0 to 1000000",
            ));
        }
        Ok(Settings {
            policy,
            preallocate,
            fraction,
            limit: self.limit,
            page_size,
            round_cutoff,
            reserve,
            defragment: self.defragment.unwrap_or(true),
            defragment_rate,
            idle_time: self.idle_time,
            idle_steps: self.idle_steps,
        })
    }
}

/// The value of an environment variable; `None` if it is unset or blank.
pub fn variable(name: &str) -> Option<String> {
    std::env::var_os(name)
        .map(|value| value.to_string_lossy().into_owned())
        .filter(|text| !text.trim().is_empty())
}

/// `SLABWISE_ALLOCATOR` and `SLABWISE_POOL` together.
fn policy_of(lookup: &impl Fn(&str) -> Option<String>) -> Result<Policy, ConfigError> {
    const POOLS: [Policy; 5] = [
        Policy::Tlsf,
        Policy::Bfc,
        Policy::Naive,
        Policy::Round,
        Policy::Unpooled,
    ];
    const OTHERS: [Policy; 3] = [Policy::Platform, Policy::Async, Policy::Vmm];
    let named = |of: &[Policy], text: &str| of.iter().copied().find(|p| p.name() == text);
    let pool = match lookup("SLABWISE_POOL") {
        None => Policy::Tlsf,
        Some(text) => named(&POOLS, text.trim())
            .ok_or_else(|| wrong("SLABWISE_POOL", text, &format!("one of {}", names(&POOLS))))?,
    };
    match lookup("SLABWISE_ALLOCATOR") {
        None => Ok(pool),
        Some(text) if text.trim() == "pool" => Ok(pool),
        Some(text) => named(&OTHERS, text.trim()).ok_or_else(|| {
            wrong(
                "SLABWISE_ALLOCATOR",
                text,
                &format!("one of pool, {}", names(&OTHERS)),
            )
        }),
    }
}

/// A field, or else a variable, or else the default; checked against its bounds.
fn setting<T: FromStr + Copy + ToString>(
    field: Option<T>,
    lookup: &impl Fn(&str) -> Option<String>,
    name: &'static str,
    default: T,
    expected: &str,
    allowed: impl Fn(&T) -> bool,
) -> Result<T, ConfigError> {
    let (value, text) = match field {
        Some(value) => (Some(value), value.to_string()),
        None => match lookup(name) {
            None => return Ok(default),
            Some(text) => (text.trim().parse().ok(), text),
        },
    };
    value
        .filter(allowed)
        .ok_or_else(|| wrong(name, text, expected))
}

fn wrong(name: &'static str, value: String, expected: &str) -> ConfigError {
    ConfigError {
        name,
        value,
        expected: expected.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(fields: &MemoryConfig, variables: &[(&str, &str)]) -> Result<Settings, ConfigError> {
        fields.settings(|name| {
            variables
                .iter()
                .find(|(n, _)| *n == name)
                .map(|(_, v)| v.to_string())
        })
    }

    #[test]
    fn fields_win_over_variables_and_variables_over_defaults() {
        let none = MemoryConfig::default();
        let defaults = read(&none, &[]).expect("defaults make sense");
        assert_eq!(
            (defaults.policy, defaults.fraction, defaults.preallocate),
            (Policy::Tlsf, 0.75, None)
        );
        assert_eq!(
            (defaults.page_size, defaults.round_cutoff, defaults.reserve),
            (4096, 24, 5)
        );
        let variables = [
            ("SLABWISE_POOL", "bfc"),
            ("SLABWISE_MEM_FRACTION", "0.4"),
            ("SLABWISE_PREALLOCATE", "false"),
            ("SLABWISE_POOL_PAGE_SIZE", "64KiB"),
            ("SLABWISE_POOL_ROUND_CUTOFF", "20"),
            ("SLABWISE_POOL_RESERVE", "10"),
        ];
        let set = read(&none, &variables).expect("they make sense");
        assert_eq!(
            (set.policy, set.fraction, set.preallocate),
            (Policy::Bfc, 0.4, Some(false))
        );
        assert_eq!(
            (set.page_size, set.round_cutoff, set.reserve),
            (65536, 20, 10)
        );
        let fields = MemoryConfig {
            policy: Some(Policy::Round),
            fraction: Some(1.0),
            preallocate: Some(true),
            ..none.clone()
        };
        let set = read(&fields, &variables).expect("they make sense");
        assert_eq!(
            (set.policy, set.fraction, set.preallocate, set.reserve),
            (Policy::Round, 1.0, Some(true), 10)
        );
        for (allocator, expected) in [
            ("pool", Policy::Bfc),
            ("platform", Policy::Platform),
            ("async", Policy::Async),
            ("vmm", Policy::Vmm),
        ] {
            let set = read(
                &none,
                &[("SLABWISE_POOL", "bfc"), ("SLABWISE_ALLOCATOR", allocator)],
            )
            .expect("it makes sense");
            assert_eq!(set.policy, expected);
        }
    }

    #[test]
    fn invalid_settings_are_refused_by_name() {
        let refused = |name: &'static str, values: &[&str]| {
            for value in values {
                let error = read(&MemoryConfig::default(), &[(name, value)]).expect_err(value);
                assert_eq!((error.name, &*error.value), (name, *value));
                assert!(error.to_string().starts_with(name), "{error}");
            }
        };
        refused(
            "SLABWISE_MEM_FRACTION",
            &["abc", "-1", "0", "NaN", "1.01", "inf"],
        );
        refused("SLABWISE_PREALLOCATE", &["maybe", "2"]);
        refused("SLABWISE_ALLOCATOR", &["tlsf", "cuda"]);
        refused("SLABWISE_POOL", &["vmm", "best"]);
        refused(
            "SLABWISE_POOL_PAGE_SIZE",
            &["abc", "-4096", "5000", "0", "128", "99999999999999999999"],
        );
        refused(
            "SLABWISE_POOL_ROUND_CUTOFF",
            &["19", "35", "x", "-1", "24.5"],
        );
        refused("SLABWISE_POOL_RESERVE", &["101", "-1", "5%", "NaN"]);
        for fraction in [0.0, -1.0, f64::NAN, 1.5] {
            let error = read(
                &MemoryConfig {
                    fraction: Some(fraction),
                    ..MemoryConfig::default()
                },
                &[],
            )
            .expect_err("nonsense");
            assert_eq!(error.name, "SLABWISE_MEM_FRACTION");
        }
        let rate = MemoryConfig {
            defragment_rate: Some(f64::NAN),
            ..MemoryConfig::default()
        };
        assert_eq!(
            read(&rate, &[]).expect_err("nonsense").name,
            "defragment_rate"
        );
        assert!(
            "best"
                .parse::<Policy>()
                .is_err_and(|e| e.contains("tlsf, bfc"))
        );
    }
}
