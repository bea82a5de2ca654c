//! `slabwise info`: what the machine offers and which settings were read.

use slabwise::{Device, Params, Result, Session};
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
    let rows = [
        ("slabwise", env!("CARGO_PKG_VERSION").to_string()),
        ("device", session.device().to_string()),
        ("cpu", cpu_name()),
        ("instruction sets", format!("{} (in use: {})", levels.join(", "), Isa::detect())),
        ("threads", threads),
        ("SLABWISE_THREADS", variable.unwrap_or_else(|_| "not set".into())),
    ];
    pairs(&rows)
}

/// The CPU's name where the system tells it, else its architecture.
fn cpu_name() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|l| l.strip_prefix("model name")?.split_once(':'));
    name.map_or(std::env::consts::ARCH, |(_, name)| name.trim()).to_string()
}
