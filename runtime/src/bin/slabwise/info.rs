//! `slabwise info`: what the machine offers and which settings were read.

use slabwise::memory::MemoryConfig;
use slabwise::{Bytes, Device, Params, Result, Session};
use slabwise_kernels::cpu::Isa;

use crate::output::pairs;

pub fn run() -> Result<()> {
    let session = Session::new(Device::auto(), Params::seeded(0))?;
    let variable = std::env::var("SLABWISE_THREADS");
    let threads = match &variable {
        Ok(_) => format!("{} (from SLABWISE_THREADS)", session.threads()),
        Err(_) => format!("{} (one for each core)", session.threads()),
    };
    let levels: Vec<String> = Isa::available().iter().map(ToString::to_string).collect();
    // A session has been opened with them: they make sense.
    let memory = MemoryConfig::default().resolve().unwrap_or_default();
    let from = |name: &str| if std::env::var_os(name).is_some() { format!("from {name}") } else { "the default".into() };
    let shown = |value: Option<String>, name: &str| format!("{} ({})", value.unwrap_or_else(|| "as the device prefers".into()), from(name));
    let policy = if std::env::var_os("SLABWISE_ALLOCATOR").is_some() { "SLABWISE_ALLOCATOR" } else { "SLABWISE_POOL" };
    let rows = [
        ("slabwise", env!("CARGO_PKG_VERSION").to_string()),
        ("device", session.device().to_string()),
        ("cpu", cpu_name()),
        ("instruction sets", format!("{} (in use: {})", levels.join(", "), Isa::detect())),
        ("threads", threads),
        ("pool policy", shown(memory.policy.map(|p| p.to_string()), policy)),
        ("pool preallocates", shown(memory.preallocate.map(|p| p.to_string()), "SLABWISE_PREALLOCATE")),
        ("pool fraction", shown(memory.fraction.map(|f| f.to_string()), "SLABWISE_MEM_FRACTION")),
        ("pool page", shown(memory.page_size.map(|b| Bytes(b).to_string()), "SLABWISE_POOL_PAGE_SIZE")),
        ("pool round cutoff", shown(memory.round_cutoff.map(|c| format!("2^{c}")), "SLABWISE_POOL_ROUND_CUTOFF")),
        ("pool reserve", shown(memory.reserve.map(|r| format!("{r} %")), "SLABWISE_POOL_RESERVE")),
        ("SLABWISE_THREADS", variable.unwrap_or_else(|_| "not set".into())),
    ];
    let cuda = Device::survey();
    let rows: Vec<(&str, String)> = rows.into_iter().chain(cuda.iter().map(|(name, about)| (name.as_str(), about.clone()))).collect();
    pairs(&rows)
}

/// The CPU's name where the system tells it, else its architecture.
fn cpu_name() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|l| l.strip_prefix("model name")?.split_once(':'));
    name.map_or(std::env::consts::ARCH, |(_, name)| name.trim()).to_string()
}
