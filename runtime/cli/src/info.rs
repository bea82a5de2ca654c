//! `slabwise info`: the machine's features and the settings read; invalid ones are marked.

use slabwise::memory::MemoryConfig;
use slabwise::settings::{self, variable};
use slabwise::{Bytes, Device, Result};
use slabwise_kernels::cpu::Isa;

use crate::output::pairs;

pub fn run() -> Result<()> {
    let (memory, mistakes) = MemoryConfig::survey();
    let refused = |error: &dyn std::fmt::Display| format!("refused: {error}");
    let from = |name: &str| {
        if variable(name).is_some() {
            format!("from {name}")
        } else {
            "the default".into()
        }
    };
    let shown = |value: Option<String>, name: &str| match mistakes
        .iter()
        .find(|mistake| mistake.name == name)
    {
        Some(mistake) => refused(mistake),
        None => format!(
            "{} ({})",
            value.unwrap_or_else(|| "as the device prefers".into()),
            from(name)
        ),
    };
    let switch = |name: &str| match settings::switch(name) {
        Ok(is_on) => format!("{} ({})", if is_on { "on" } else { "off" }, from(name)),
        Err(error) => refused(&error),
    };
    let threads = match settings::threads() {
        Ok(Some(threads)) => format!("{threads} (from SLABWISE_THREADS)"),
        Ok(None) => format!(
            "{} (one for each core)",
            std::thread::available_parallelism().map_or(1, usize::from)
        ),
        Err(error) => refused(&error),
    };
    let levels: Vec<String> = Isa::available().iter().map(ToString::to_string).collect();
    let both = ["SLABWISE_ALLOCATOR", "SLABWISE_POOL"];
    let wrong = mistakes
        .iter()
        .map(|mistake| mistake.name)
        .find(|name| both.contains(name));
    let policy = wrong.unwrap_or(if variable(both[0]).is_some() {
        both[0]
    } else {
        both[1]
    });
    let rows = [
        ("slabwise", env!("CARGO_PKG_VERSION").to_string()),
        ("device", Device::auto().to_string()),
        ("cpu", cpu_name()),
        (
            "instruction sets",
            format!("{} (in use: {})", levels.join(", "), Isa::detect()),
        ),
        ("threads", threads),
        (
            "pool policy",
            shown(memory.policy.map(|p| p.to_string()), policy),
        ),
        (
            "pool preallocates",
            shown(
                memory.preallocate.map(|p| p.to_string()),
                "SLABWISE_PREALLOCATE",
            ),
        ),
        (
            "pool fraction",
            shown(
                memory.fraction.map(|f| f.to_string()),
                "SLABWISE_MEM_FRACTION",
            ),
        ),
        (
            "pool page",
            shown(
                memory.page_size.map(|b| Bytes(b).to_string()),
                "SLABWISE_POOL_PAGE_SIZE",
            ),
        ),
        (
            "pool round cutoff",
            shown(
                memory.round_cutoff.map(|c| format!("2^{c}")),
                "SLABWISE_POOL_ROUND_CUTOFF",
            ),
        ),
        (
            "pool reserve",
            shown(
                memory.reserve.map(|r| format!("{r} %")),
                "SLABWISE_POOL_RESERVE",
            ),
        ),
        ("CUDA graphs", switch(settings::GRAPHS)),
        ("autotuning", switch(settings::AUTOTUNE)),
        ("cuDNN", switch(settings::CUDNN)),
    ];
    let cuda = Device::survey();
    let rows: Vec<(&str, String)> = rows
        .into_iter()
        .chain(
            cuda.iter()
                .map(|(name, about)| (name.as_str(), about.clone())),
        )
        .collect();
    pairs(&rows)
}

/// The CPU's name where the system tells it, else its architecture.
fn cpu_name() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text
        .lines()
        .find_map(|l| l.strip_prefix("model name")?.split_once(':'));
    name.map_or(std::env::consts::ARCH, |(_, name)| name.trim())
        .to_string()
}
