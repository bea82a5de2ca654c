//! Descriptions of devices: limits and rates, from the files in `data/devices`.
//!
//! The model that ranks products, the tuner and `slabwise-gpu --model` read them. A device of the
//! driver gets the description of its architecture, with the numbers that the driver reports.

use std::fmt;
use std::sync::OnceLock;

use serde::Deserialize;

use crate::abi::{Speeds, Target};

/// The files and their names, by capability.
const FILES: [(&str, &str); 7] = [
    ("a100", include_str!("../data/devices/a100.toml")),
    ("a6000", include_str!("../data/devices/a6000.toml")),
    ("rtx4090", include_str!("../data/devices/rtx4090.toml")),
    ("h100", include_str!("../data/devices/h100.toml")),
    ("h200", include_str!("../data/devices/h200.toml")),
    ("b200", include_str!("../data/devices/b200.toml")),
    ("rtx5090", include_str!("../data/devices/rtx5090.toml")),
];

/// A device: its limits and rates.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// The vendor's name for it.
    pub name: String,
    /// Compute capability, as in `sm_90`.
    pub capability: u32,
    /// Lanes of a wave (a warp).
    pub wave_width: u32,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Their highest clock, MHz.
    pub clock_mhz: f64,
    /// Their clock under a heavy load, MHz.
    pub sustained_mhz: f64,
    /// Microseconds between the ends of two small kernels of a graph of which one depends on the
    /// other.
    pub launch_us: f64,
    /// The limits of a multiprocessor.
    pub multiprocessor: Multiprocessor,
    /// The limits of a block.
    pub block: Block,
    /// The rates of a multiprocessor.
    pub rates: Rates,
    /// The memory's and the cache's bandwidths.
    pub bandwidth: Bandwidth,
}

/// The limits of a multiprocessor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Multiprocessor {
    /// Registers of 32 bits.
    pub registers: u32,
    /// Waves at once.
    pub waves: u32,
    /// Blocks at once.
    pub blocks: u32,
    /// Shared memory, bytes.
    pub shared_bytes: u32,
}

/// The limits of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Block {
    /// Shared memory of a kernel that requests no more, bytes.
    pub shared_bytes: u32,
    /// Shared memory at most, bytes.
    pub shared_bytes_max: u32,
}

/// Multiply-adds of a multiprocessor per cycle.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rates {
    /// In f32.
    pub f32: f64,
    /// On tensor cores, with operands of f32 rounded to tf32.
    pub tf32: f64,
    /// On tensor cores, with operands in f16 or bf16 and sums in f32.
    pub half: f64,
    /// The share of the tensor cores' rates that `mma.sync` reaches.
    pub mma_share: f64,
}

/// Bandwidths in GB/s.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bandwidth {
    /// The bandwidth of memory.
    pub memory: f64,
    /// The bandwidth of the L2 cache.
    pub cache: f64,
    /// The bytes of the L2 cache.
    pub cache_bytes: u64,
    /// The bytes of a sector, which memory moves at once.
    pub sector_bytes: u32,
}

/// The attributes that a driver reports of a device; 0 where it does not.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Attributes {
    /// Compute capability.
    pub capability: u32,
    /// Lanes of a wave.
    pub wave_width: u32,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Their highest clock, MHz.
    pub clock_mhz: f64,
    /// The limits of a multiprocessor.
    pub multiprocessor: Multiprocessor,
    /// The limits of a block.
    pub block: Block,
    /// The bandwidth of memory, GB/s.
    pub memory: f64,
    /// The bytes of the L2 cache.
    pub cache_bytes: u64,
}

impl Description {
    /// The described devices and the names of their files, by capability.
    pub fn all() -> &'static [(&'static str, Description)] {
        static ALL: OnceLock<Vec<(&str, Description)>> = OnceLock::new();
        ALL.get_or_init(|| {
            let read = |(name, text): (&'static str, &str)| {
                let described = toml::from_str(text);
                (
                    name,
                    described.unwrap_or_else(|e| panic!("{name}.toml: {e}")),
                )
            };
            FILES.map(read).into()
        })
    }

    /// The description of this name: a file's, the vendor's, or an architecture's, as `sm_90`.
    pub fn named(name: &str) -> Option<&'static Description> {
        let is_meant = |(file, described): &&(&str, Description)| {
            file.eq_ignore_ascii_case(name)
                || described.name.eq_ignore_ascii_case(name)
                || name == format!("sm_{}", described.capability)
        };
        Description::all().iter().find(is_meant).map(|(_, d)| d)
    }

    /// The description of the newest described architecture that is not newer than `capability`, or
    /// of the oldest one.
    pub fn nearest(capability: u32) -> &'static Description {
        let all = Description::all();
        let older = all.iter().filter(|(_, d)| d.capability <= capability);
        let newest = older.map(|(_, d)| d.capability).max();
        let found = all.iter().find(|(_, d)| Some(d.capability) == newest);
        &found.unwrap_or(&all[0]).1
    }

    /// The description of a device with these attributes: that of its architecture where they are
    /// unknown. Clocks under load and the cache's bandwidth keep their proportions.
    pub fn of(name: &str, reported: &Attributes) -> Description {
        let mut found = Description::nearest(reported.capability).clone();
        let old = found.clone();
        let known = |value: &mut u32, reported: u32| {
            if reported != 0 {
                *value = reported;
            }
        };
        found.name = name.into();
        known(&mut found.capability, reported.capability);
        known(&mut found.wave_width, reported.wave_width);
        known(&mut found.multiprocessors, reported.multiprocessors);
        let (own, limits) = (&mut found.multiprocessor, reported.multiprocessor);
        known(&mut own.registers, limits.registers);
        known(&mut own.waves, limits.waves);
        known(&mut own.blocks, limits.blocks);
        known(&mut own.shared_bytes, limits.shared_bytes);
        let (own, limits) = (&mut found.block, reported.block);
        known(&mut own.shared_bytes, limits.shared_bytes);
        known(&mut own.shared_bytes_max, limits.shared_bytes_max);
        if reported.clock_mhz > 0.0 {
            found.clock_mhz = reported.clock_mhz;
            found.sustained_mhz *= reported.clock_mhz / old.clock_mhz;
        }
        let cycles = |d: &Description| f64::from(d.multiprocessors) * d.sustained_mhz;
        let share = cycles(&found) / cycles(&old);
        found.bandwidth.cache *= share;
        found.bandwidth.memory = match reported.memory > 0.0 {
            true => reported.memory,
            false => old.bandwidth.memory * share,
        };
        if reported.cache_bytes > 0 {
            found.bandwidth.cache_bytes = reported.cache_bytes;
        }
        found
    }

    /// The target of source for the device, without tf32.
    pub fn target(&self) -> Target {
        Target {
            sm: self.capability,
            multiprocessors: self.multiprocessors,
            shared_bytes_max: self.block.shared_bytes_max,
            wave_width: self.wave_width,
            speeds: self.speeds(),
            sector_bytes: self.bandwidth.sector_bytes,
            tf32: false,
            guarded: false,
        }
    }

    fn speeds(&self) -> Speeds {
        let whole = |x: f64| x.round().max(1.0) as u32;
        let cycles = f64::from(self.multiprocessors.max(1)) * self.sustained_mhz * 1e6;
        let bytes = |gigabytes: f64| whole(1000.0 * 1e9 * gigabytes / cycles);
        Speeds {
            f32: whole(self.rates.f32),
            tf32: whole(self.rates.tf32 * self.rates.mma_share),
            half: whole(self.rates.half * self.rates.mma_share),
            mma_share: whole(1e3 * self.rates.mma_share),
            memory: bytes(self.bandwidth.memory),
            cache: bytes(self.bandwidth.cache),
        }
    }

    /// Operations per second at the highest clock in f32, where a fused multiply-add counts as two.
    pub fn f32_peak(&self) -> f64 {
        self.peak(self.rates.f32)
    }

    /// The same on tensor cores with operands of f32 rounded to tf32.
    pub fn tf32_peak(&self) -> f64 {
        self.peak(self.rates.tf32)
    }

    /// The same with operands in f16 or bf16.
    pub fn half_peak(&self) -> f64 {
        self.peak(self.rates.half)
    }

    fn peak(&self, rate: f64) -> f64 {
        2e6 * rate * self.clock_mhz * f64::from(self.multiprocessors)
    }
}

/// The source of the numbers, and the peaks that follow from them.
impl fmt::Display for Description {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The driver reports no rates: they are those of the nearest architecture with a file.
        let (own, described) = (
            self.capability,
            Description::nearest(self.capability).capability,
        );
        let rates = match own == described {
            true => String::new(),
            false => format!(" and, as those of sm_{own} are unknown, the rates of sm_{described}"),
        };
        write!(
            f,
            "by the device's attributes{rates}: {} multiprocessors at {:.2} GHz, f32 {:.1}, tf32 {:.1}, halves {:.1} Tflop/s, memory {:.0} GB/s",
            self.multiprocessors,
            self.clock_mhz / 1e3,
            self.f32_peak() / 1e12,
            self.tf32_peak() / 1e12,
            self.half_peak() / 1e12,
            self.bandwidth.memory
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_complete_and_consistent() {
        let all = Description::all();
        assert!(all.is_sorted_by_key(|(_, d)| d.capability));
        for (file, device) in all {
            let Description {
                block,
                multiprocessor,
                rates,
                bandwidth,
                ..
            } = device;
            assert_eq!(Description::named(file), Some(device));
            assert_eq!(Description::named(&device.name), Some(device));
            assert!(block.shared_bytes <= block.shared_bytes_max, "{file}");
            assert!(
                block.shared_bytes_max < multiprocessor.shared_bytes,
                "{file}"
            );
            assert!(matches!(device.wave_width, 32 | 64), "{file}");
            assert!(device.sustained_mhz <= device.clock_mhz, "{file}");
            assert!(rates.f32 <= rates.tf32 && rates.tf32 < rates.half, "{file}");
            assert!(rates.mma_share > 0.0 && rates.mma_share <= 1.0, "{file}");
            assert!(bandwidth.memory < bandwidth.cache, "{file}");
            let sector = bandwidth.sector_bytes;
            assert!(sector.is_power_of_two() && sector >= 16, "{file}");
        }
        for sm in [80, 86, 89, 90, 100, 120] {
            let found = Description::named(&format!("sm_{sm}")).expect("a description");
            assert_eq!(found.capability, sm);
        }
        assert_eq!(Description::named("sm_75"), None);
        // NVIDIA states 19.5, 66.9 and 989 Tflop/s for these.
        let [a100, h100] = ["a100", "h100"].map(|n| Description::named(n).expect("known"));
        assert!(
            (a100.f32_peak() / 19.5e12 - 1.0).abs() < 0.01,
            "{}",
            a100.f32_peak()
        );
        assert!(
            (a100.half_peak() / 312e12 - 1.0).abs() < 0.01,
            "{}",
            a100.half_peak()
        );
        assert!(
            (h100.f32_peak() / 66.9e12 - 1.0).abs() < 0.01,
            "{}",
            h100.f32_peak()
        );
    }

    #[test]
    fn unknown_devices_are_described_by_their_attributes() {
        assert_eq!(Description::nearest(103).capability, 100);
        assert_eq!(Description::nearest(75).capability, 80);
        assert_eq!(Description::nearest(999).capability, 120);
        // Half an H100, and nothing else is known.
        let half = Attributes {
            capability: 90,
            multiprocessors: 66,
            ..Attributes::default()
        };
        let h100 = Description::named("h100").expect("known");
        let found = Description::of("half", &half);
        assert_eq!((found.name.as_str(), found.multiprocessors), ("half", 66));
        assert_eq!(found.bandwidth.memory, h100.bandwidth.memory / 2.0);
        assert_eq!(found.target().speeds, h100.target().speeds);
        // Newer than all descriptions: the attributes with the rates of the newest.
        let newer = Attributes {
            capability: 999,
            multiprocessors: 100,
            clock_mhz: 1000.0,
            ..Attributes::default()
        };
        let newer = Description::of("newer", &newer);
        let newest = Description::nearest(999);
        assert_eq!(newer.rates, newest.rates);
        assert_eq!(newer.f32_peak(), 2e9 * newest.rates.f32 * 100.0);
        assert!(newer.to_string().starts_with(
            "by the device's attributes and, as those of sm_999 are unknown, the rates of sm_120: 100 multiprocessors at 1.00 GHz, "
        ));
        assert!(
            newest
                .to_string()
                .starts_with("by the device's attributes: ")
        );
        // A device with everything reported.
        let whole = Attributes {
            capability: 87,
            wave_width: 32,
            multiprocessors: 16,
            clock_mhz: 1300.0,
            multiprocessor: Multiprocessor {
                registers: 65_536,
                waves: 48,
                blocks: 16,
                shared_bytes: 164 << 10,
            },
            block: Block {
                shared_bytes: 48 << 10,
                shared_bytes_max: 163 << 10,
            },
            memory: 204.8,
            cache_bytes: 4 << 20,
        };
        let found = Description::of("Orin", &whole);
        assert_eq!(found.multiprocessor, whole.multiprocessor);
        assert_eq!(found.block, whole.block);
        assert_eq!(found.bandwidth.memory, 204.8);
        assert_eq!(found.target().sm, 87);
        assert_eq!(found.target().speeds.memory, {
            let cycles = 16.0 * 1300e6 * 1740.0 / 1800.0f64;
            (1000.0 * 204.8e9 / cycles).round() as u32
        });
    }
}
