//! Compiled functions of training steps for a machine that is to measure them, made on another one
//! without a device.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

use serde_json::{Map, Value, json};
use slabwise_compiler::backend::{self, Kernel};
use slabwise_compiler::ir::{self, KernelCall, Recompute};
use slabwise_cuda::cache::Cache;
use slabwise_cuda::compiler::Compiler;
use slabwise_cuda::nvrtc::{self, Program};
use slabwise_cuda::{Description, Function, PRELUDE};
use slabwise_kernels::spec::Body;

use crate::items::{self, MODELS, PRECISIONS, matches};
use crate::step;

/// The file in a folder of compiled functions that says which compilers and architectures they are
/// of, a line of JSON for each.
const CONTENTS: &str = "contents.jsonl";

/// The name of the device of this machine.
const HERE: &str = "here";

/// Which steps are compiled.
pub struct Wanted<'a> {
    /// Devices by name, or "here".
    pub devices: &'a [String],
    /// Patterns of steps; all steps if there are none.
    pub only: &'a [String],
    /// Whether batches are small.
    pub quick: bool,
}

/// Compiles the functions that the steps need on described devices into a folder, and appends a
/// line to its table of contents for each architecture. Without a compiler it says so.
///
/// # Errors
/// If a device is unknown, a step or a function cannot be compiled, or the folder not written.
pub fn fill(folder: &Path, wanted: &Wanted<'_>) -> Result<(), String> {
    let (major, minor) = match nvrtc::version() {
        Ok(version) => version,
        Err(why) => {
            crate::say(&format!("No functions are compiled: {why}"));
            return Ok(());
        }
    };
    let cache = Cache::at(folder).map_err(|e| e.to_string())?;
    // The functions of all devices of an architecture together: most are the same.
    let mut by_sm: BTreeMap<u32, BTreeMap<String, Function>> = BTreeMap::new();
    for name in wanted.devices {
        let device = described(name)?;
        let found = functions(&device, wanted)?;
        by_sm.entry(device.capability).or_default().extend(found);
    }
    for (sm, functions) in by_sm {
        let began = Instant::now();
        let programs = Program::each(PRELUDE, functions.values(), sm);
        let made = Compiler::of_process().compile(Some(&cache), &programs);
        let made = made.map_err(|e| e.to_string())?;
        let bytes: usize = made.iter().map(|code| code.image.len()).sum();
        let line = json!({
            "nvrtc": format!("{major}.{minor}"),
            "sm": sm,
            "functions": made.len(),
            "bytes": bytes,
        });
        let file = folder.join(CONTENTS);
        let appended = std::fs::File::options()
            .create(true)
            .append(true)
            .open(&file)
            .and_then(|mut f| f.write_all(format!("{line}\n").as_bytes()));
        appended.map_err(|e| format!("{}: {e}", file.display()))?;
        crate::say(&format!(
            "{} functions for sm_{sm} by NVRTC {major}.{minor} in {:.0} s: {} KiB",
            made.len(),
            began.elapsed().as_secs_f64(),
            bytes >> 10
        ));
    }
    Ok(())
}

fn described(name: &str) -> Result<Description, String> {
    if name == HERE {
        let found = slabwise_cuda::driver::properties(0).map_err(|e| e.to_string())?;
        return Ok(found.description);
    }
    let found = Description::named(name).cloned();
    found.ok_or_else(|| crate::model::unknown(name))
}

/// The functions of the steps on a device.
fn functions(
    device: &Description,
    wanted: &Wanted<'_>,
) -> Result<BTreeMap<String, Function>, String> {
    let mut all = BTreeMap::new();
    for (label, model, batch) in MODELS {
        for precision in PRECISIONS {
            let item = format!("step/{label}/{precision}");
            let only = wanted.only;
            if only.is_empty() || only.iter().any(|pattern| matches(pattern, &item)) {
                let batch = items::batch(batch, wanted.quick);
                let found = of_step(model, batch, precision, device);
                all.extend(found.map_err(|e| format!("{item}: {e}"))?);
            }
        }
    }
    Ok(all)
}

/// The functions of a training step.
fn of_step(
    model: &str,
    batch: u32,
    precision: &str,
    device: &Description,
) -> Result<BTreeMap<String, Function>, String> {
    let (compiled, target) = step::compiled(model, batch, precision, device)?;
    let program = compiled.program();
    let bounds = program.graph.symbols.bounds();
    backend::functions(kernels(program), &bounds, &target).map_err(|e| e.to_string())
}

/// The kernels of a program and of its recompute clones, each with whether it is guarded, as one is
/// that assigns variables in a program with checks.
fn kernels(program: &ir::Program) -> Vec<(&Kernel, bool)> {
    let checks = |call: &KernelCall| matches!(call.spec.body, Body::BoundsCheck(_));
    let checked = program.kernels.iter().any(checks);
    let mut found = Vec::new();
    for call in &program.kernels {
        let guarded = checked && !program.assigned(call).is_empty();
        found.extend(call.kernel.as_deref().map(|kernel| (kernel, guarded)));
        if let Recompute::Clone(clone) = &call.recompute {
            found.extend(clone.kernel.as_deref().map(|kernel| (kernel, false)));
        }
    }
    found
}

/// How many functions of a folder fit a device and its compiler, in words and as a field of results;
/// nothing is known of a folder without contents.
pub fn fitting(folder: &Path, about: &Map<String, Value>) -> Option<(String, u64)> {
    let text = std::fs::read_to_string(folder.join(CONTENTS)).ok()?;
    let pair = |of: &Value| {
        let [nvrtc, sm] = ["nvrtc", "sm"].map(|key| of[key].to_string().replace('"', ""));
        format!("NVRTC {nvrtc} and sm_{sm}")
    };
    // A folder that was filled again has at least as many functions as the longest line says.
    let mut most: Vec<(String, u64)> = Vec::new();
    for line in text.lines() {
        let Ok(line) = serde_json::from_str::<Value>(line) else {
            continue;
        };
        let (of, count) = (pair(&line), line["functions"].as_u64().unwrap_or_default());
        match most.iter_mut().find(|(known, _)| *known == of) {
            Some((_, functions)) => *functions = count.max(*functions),
            None => most.push((of, count)),
        }
    }
    let device = pair(&about["versions"]);
    let fit = most.iter().find(|(of, count)| *of == device && *count > 0);
    let others: Vec<&str> = most.iter().map(|(of, _)| &**of).collect();
    Some(match fit {
        Some((_, fit)) => (
            format!("{fit} functions are compiled already, for {device}"),
            *fit,
        ),
        None if others.is_empty() => ("No functions are compiled already".into(), 0),
        None => {
            let others = others.join(", ");
            let said =
                format!("None of the compiled functions is for {device}; they are for {others}");
            (said, 0)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_contents_of_a_folder_are_told_in_words() {
        let folder = tempfile::tempdir().expect("a folder");
        let versions = json!({"versions": {"nvrtc": "13.0", "sm": 90}});
        let about = versions.as_object().expect("an object");
        let told = |lines: &str| {
            std::fs::write(folder.path().join(CONTENTS), lines).expect("own folder");
            fitting(folder.path(), about)
        };
        let line = |nvrtc: &str, sm: u32, functions: u64| {
            let line = json!({"nvrtc": nvrtc, "sm": sm, "functions": functions, "bytes": 1});
            format!("{line}\n")
        };
        let said = |text: &str, fit| Some((text.to_string(), fit));
        assert_eq!(
            told(&line("13.0", 90, 7)),
            said(
                "7 functions are compiled already, for NVRTC 13.0 and sm_90",
                7
            )
        );
        // The folder was filled twice, the second time with fewer steps.
        assert_eq!(
            told(&(line("13.0", 90, 7) + &line("13.0", 90, 5))),
            said(
                "7 functions are compiled already, for NVRTC 13.0 and sm_90",
                7
            )
        );
        assert_eq!(
            told(&(line("13.0", 80, 7) + &line("12.9", 90, 5) + &line("13.0", 80, 7))),
            said(
                "None of the compiled functions is for NVRTC 13.0 and sm_90; they are for \
                 NVRTC 13.0 and sm_80, NVRTC 12.9 and sm_90",
                0
            )
        );
        assert_eq!(told(""), said("No functions are compiled already", 0));
    }
}
