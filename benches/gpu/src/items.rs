//! The list of measurements and checks.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use slabwise::{CompileOptions, Precision};

use crate::child;

/// The line that a test prints if it runs on a GPU.
pub const USES_THE_GPU: &str = "runs on the GPU";

/// The variable that makes measurements quick, those of this program and of peers.
pub const QUICK: &str = "SLABWISE_GPU_QUICK";

/// The variable that names the cache of compiled functions and kernel choices.
pub const CACHE: &str = "SLABWISE_CACHE_DIR";

/// The kind of an item, with its command.
#[derive(Clone, Debug)]
pub enum Work {
    /// A measurement of this program, by the words after `measure`.
    Own(Vec<String>),
    /// A script of another framework.
    Peer { script: PathBuf, words: Vec<String> },
    /// A test of a test binary, and the checker that it runs in, if any.
    Test {
        binary: PathBuf,
        name: String,
        within: Option<Checker>,
    },
}

/// The vendor's checker of memory accesses and barriers.
#[derive(Clone, Debug)]
pub struct Checker {
    program: PathBuf,
    tool: &'static str,
}

impl Checker {
    /// The summary that the tool prints if it has checked kernels and found nothing.
    pub fn clean(&self) -> &'static str {
        match self.tool {
            "racecheck" => "RACECHECK SUMMARY: 0 hazards",
            _ => "ERROR SUMMARY: 0 errors",
        }
    }
}

/// An item of the list.
#[derive(Clone, Debug)]
pub struct Item {
    pub name: String,
    pub work: Work,
    /// Whether it runs alone, because of its times.
    pub timed: bool,
    pub limit: Duration,
    /// Whether it runs without the caches of earlier processes: neither kernels nor tuning results.
    pub fresh: bool,
    /// Variables of its process.
    pub variables: Vec<Variable>,
    program: PathBuf,
    /// The folder of compiled functions that came with this program.
    kernels: Option<PathBuf>,
}

/// The locations of programs, scripts and tests.
pub struct Places {
    /// This program.
    pub program: PathBuf,
    /// Scripts of other frameworks.
    peers: PathBuf,
    /// Test binaries, if there are any.
    tests: Option<PathBuf>,
    /// Compiled functions, if there are any and no other cache is set.
    pub kernels: Option<PathBuf>,
}

impl Places {
    /// The locations beside this program, or else in the source tree.
    ///
    /// # Errors
    /// If the folder of tests does not exist.
    pub fn find(tests: Option<&Path>) -> Result<Places, String> {
        let program =
            std::env::current_exe().map_err(|e| format!("this program has no path: {e}"))?;
        let beside = program.parent().unwrap_or(Path::new(".")).to_path_buf();
        let packed = beside.join("peers");
        let peers = if packed.is_dir() {
            packed
        } else {
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../peers")
        };
        let tests = match tests {
            Some(folder) if !folder.is_dir() => {
                return Err(format!(
                    "{} is no folder of test binaries",
                    folder.display()
                ));
            }
            Some(folder) => Some(folder.to_path_buf()),
            None => Some(beside.join("tests")).filter(|folder| folder.is_dir()),
        };
        let kernels = Some(beside.join("kernels")).filter(|folder| folder.is_dir());
        let other = std::env::var_os(CACHE).is_some_and(|folder| !folder.is_empty());
        Ok(Places {
            program,
            peers,
            tests,
            kernels: kernels.filter(|_| !other),
        })
    }
}

/// The models, their names in items and the sizes and batches that they are measured with.
pub const MODELS: [(&str, &str, u32); 6] = [
    ("mlp", "mlp", 64),
    ("cnn", "cnn", 64),
    ("resnet20", "resnet20", 64),
    ("resnet18", "resnet18", 16),
    ("resnet50", "resnet50", 64),
    ("gpt", "gpt:layers=6,width=384,heads=6,length=256", 64),
];

/// The precisions of products and convolutions.
pub const PRECISIONS: [&str; 3] = ["f32", "tf32", "bf16"];

/// The type of products at a precision, and how a step is compiled.
pub fn compiled_as(precision: &str) -> (Precision, CompileOptions) {
    let of_products = match precision {
        "bf16" => Precision::Bf16,
        _ => Precision::F32,
    };
    // As in peers, values that stay in f32 beside products of halves may be rounded, too.
    let options = CompileOptions {
        tf32: precision != "f32",
        ..CompileOptions::default()
    };
    (of_products, options)
}

/// The batch of a model, which is small in quick runs.
pub fn batch(of_model: u32, quick: bool) -> u32 {
    if quick { 2 } else { of_model }
}

/// The ways in which PyTorch runs a step.
pub const TORCH_MODES: [&str; 4] = ["eager", "compile", "reduce-overhead", "graph"];

/// The ways in which PyTorch also runs a step of a model of images: the channels of a pixel
/// contiguous, which is the end of the name.
pub const TORCH_IMAGE_MODES: [&str; 3] = [
    "eager-channels-last",
    "compile-channels-last",
    "graph-channels-last",
];

/// The models of images.
const IMAGE_MODELS: [&str; 4] = ["cnn", "resnet20", "resnet18", "resnet50"];

/// The ways in which PyTorch runs a step of a model.
pub fn torch_modes(model: &str) -> impl Iterator<Item = &'static str> {
    let of_images = if IMAGE_MODELS.contains(&model) {
        &TORCH_IMAGE_MODES[..]
    } else {
        &[]
    };
    TORCH_MODES.iter().chain(of_images).copied()
}

/// Rows and columns of square products.
pub const PRODUCTS: [&str; 4] = ["1024", "2048", "4096", "8192"];

/// Rows and columns of the square weights that one row is multiplied with, as for a token of a language
/// model.
pub const ROWS: [&str; 2] = ["2048", "8192"];
/// How the numbers of those weights are stored.
pub const STORED: [&str; 4] = ["f32", "bf16", "8bits", "4bits"];

/// Convolutions of residual networks and of the small one: name, batch, channels in and out, image,
/// window, stride.
pub const CONVOLUTIONS: [(&str, [u32; 6]); 12] = [
    ("stem-7x7-s2", [64, 3, 64, 224, 7, 2]),
    ("64-3x3-56", [64, 64, 64, 56, 3, 1]),
    ("64-256-1x1-56", [64, 64, 256, 56, 1, 1]),
    ("256-512-1x1-s2-56", [64, 256, 512, 56, 1, 2]),
    ("128-3x3-28", [64, 128, 128, 28, 3, 1]),
    ("128-3x3-s2-56", [64, 128, 128, 56, 3, 2]),
    ("256-3x3-14", [64, 256, 256, 14, 3, 1]),
    ("1024-256-1x1-14", [64, 1024, 256, 14, 1, 1]),
    ("512-3x3-7", [64, 512, 512, 7, 3, 1]),
    ("resnet20-16-3x3-32", [64, 16, 16, 32, 3, 1]),
    ("resnet20-64-3x3-8", [64, 64, 64, 8, 3, 1]),
    ("cnn-32-64-5x5-14", [64, 32, 64, 14, 5, 1]),
];

/// One small test of each family of kernels, for checkers, which slow it down a hundred times.
const FAMILIES: [(&str, &str); 23] = [
    ("elementwise", "updates_in_place"),
    ("elementwise", "padded_rows"),
    ("elementwise", "conversions"),
    ("reductions", "rows_of_a_size_known_at_launch"),
    ("reductions", "sums_over_two_axes"),
    ("anchors", "gathers"),
    ("anchors", "scatters_add_in_order"),
    ("anchors", "long_lists_are_added_in_pieces"),
    ("anchors", "parts_are_replaced"),
    ("anchors", "the_gradient_of_an_embedding"),
    ("anchors", "pooling_and_its_gradient"),
    ("gemm", "few_rows_or_columns"),
    ("gemm", "padded_rows"),
    ("gemm", "tensor_cores"),
    ("gemm", "the_last_block_adds_parts_in_their_order"),
    ("gemm_quantized", "long_sums_are_split_into_parts"),
    ("gemm_conv", "batches_below_the_bound"),
    ("gemm_conv", "tensor_cores"),
    ("attention", "lengths_may_be_those_of_a_run"),
    ("choosing", "positions_are_those_of_a_plain_loop"),
    ("choosing", "orders_are_those_of_a_stable_sort"),
    ("choosing", "prefix_reductions_run_along_rows"),
    ("fused_launches", "parameter_updates_are_fused_horizontally"),
];

/// The vendor's tools that a family's test runs in, and the binaries whose kernels wait at barriers
/// or for other blocks, which alone run in the latter two.
const TOOLS: [(&str, &[&str]); 3] = [
    ("memcheck", &[]),
    ("racecheck", WAITING),
    ("synccheck", WAITING),
];
const WAITING: &[&str] = &[
    "attention",
    "gemm",
    "gemm_conv",
    "gemm_quantized",
    "reductions",
    "choosing",
];

/// All items, in their order. If `quick`, sizes and numbers of runs are small.
///
/// # Errors
/// If a test binary does not list its tests.
pub fn all(places: &Places, quick: bool) -> Result<Vec<Item>, String> {
    let mut list = List {
        places,
        quick,
        items: Vec::new(),
    };
    let tests = list.tests()?;
    list.own("bandwidth/device-copy", 60, &["copy", "device"], &[]);
    list.own("bandwidth/to-device", 60, &["copy", "to-device"], &[]);
    list.own("bandwidth/to-host", 60, &["copy", "to-host"], &[]);
    list.peer("bandwidth/torch", 60, "torch_step.py", &["copy"]);
    list.own("launches/graph", 60, &["launches"], &[]);
    list.own("launches/no-graph", 60, &["launches"], &[NO_GRAPHS]);
    list.steps();
    list.budgets();
    list.products();
    list.rows();
    list.convolutions();
    list.sanitized(&tests);
    // The most valuable first: with a budget, the rest is left out.
    list.items.sort_by_key(|item| match &item.work {
        Work::Own(_) | Work::Test { within: None, .. } => 0,
        Work::Peer { .. } => 1,
        Work::Test { .. } => 2,
    });
    Ok(list.items)
}

type Variable = (&'static str, &'static str);

/// Tests run on the device only, and several share its memory.
const ON_A_GPU: [Variable; 2] = [("SLABWISE_REQUIRE_GPU", "1"), ("SLABWISE_PREALLOCATE", "0")];

/// A checker finds accesses beyond the end of an allocation, but not of an argument in a page that
/// others share.
const CHECKED: [Variable; 3] = [ON_A_GPU[0], ON_A_GPU[1], ("SLABWISE_SEPARATE_ARENAS", "1")];

const NO_GRAPHS: Variable = ("SLABWISE_CUDA_GRAPHS", "0");

struct List<'a> {
    places: &'a Places,
    quick: bool,
    items: Vec<Item>,
}

impl List<'_> {
    fn push(
        &mut self,
        name: String,
        seconds: u64,
        work: Work,
        variables: &[Variable],
    ) -> &mut Item {
        let program = self.places.program.clone();
        let limit = Duration::from_secs(seconds);
        let mut variables = variables.to_vec();
        if self.quick {
            variables.push((QUICK, "1"));
        }
        self.items.push(Item {
            name,
            work,
            timed: true,
            limit,
            fresh: false,
            variables,
            program,
            kernels: self.places.kernels.clone(),
        });
        self.items.last_mut().expect("it was just added")
    }

    fn own(
        &mut self,
        name: &str,
        seconds: u64,
        words: &[&str],
        variables: &[Variable],
    ) -> &mut Item {
        // Preallocated memory does not count as a peak.
        let variables = [&[("SLABWISE_PREALLOCATE", "0")], variables].concat();
        self.push(
            name.into(),
            seconds,
            Work::Own(words.iter().map(|w| w.to_string()).collect()),
            &variables,
        )
    }

    fn peer(&mut self, name: &str, seconds: u64, script: &str, words: &[&str]) {
        let script = self.places.peers.join(script);
        let words = words.iter().map(|w| w.to_string()).collect();
        self.push(name.into(), seconds, Work::Peer { script, words }, &[]);
    }

    /// Training steps of all models by every framework.
    fn steps(&mut self) {
        for (name, model, of_model) in MODELS {
            let batch = batch(of_model, self.quick).to_string();
            for precision in PRECISIONS {
                let step = format!("step/{name}/{precision}");
                let words = ["step", model, &batch, precision];
                self.own(&format!("{step}/slabwise"), 180, &words, &[]);
                self.own(
                    &format!("{step}/slabwise-no-graph"),
                    180,
                    &words,
                    &[NO_GRAPHS],
                );
                // The model of the device, which chooses between these, does not know cuDNN.
                if ["resnet20", "resnet18", "resnet50"].contains(&name) && precision != "f32" {
                    for way in ["channels-last", "sums-in-epilogues", "channels-first"] {
                        let words = ["step", model, &batch, precision, way];
                        self.own(&format!("{step}/slabwise-{way}"), 180, &words, &[]);
                    }
                }
                for mode in torch_modes(name) {
                    let is_compiled = mode.starts_with("compile") || mode == "reduce-overhead";
                    let seconds = if is_compiled { 300 } else { 120 };
                    self.peer(
                        &format!("{step}/torch-{mode}"),
                        seconds,
                        "torch_step.py",
                        &["step", mode, model, &batch, precision],
                    );
                }
                self.peer(
                    &format!("{step}/jax"),
                    240,
                    "jax_step.py",
                    &["step", model, &batch, precision],
                );
            }
        }
    }

    /// Steps within half of their slab, whose losses must equal those in all of it; planned bytes
    /// beside those of the driver.
    fn budgets(&mut self) {
        for (name, model, of_model) in MODELS {
            let batch = batch(of_model, self.quick).to_string();
            self.own(
                &format!("bytes/{name}"),
                180,
                &["bytes", model, &batch],
                &[],
            );
            // The small convolution network has one tensor that is larger than half of its slab.
            if ["resnet20", "gpt"].contains(&name) {
                self.own(
                    &format!("budget/{name}/recompute"),
                    240,
                    &["budget", model, &batch, "recompute"],
                    &[],
                );
                self.own(
                    &format!("budget/{name}/offload"),
                    240,
                    &["budget", model, &batch, "offload"],
                    &[],
                );
            }
        }
    }

    fn products(&mut self) {
        for precision in PRECISIONS {
            for n in PRODUCTS {
                let words = ["product", if self.quick { "64" } else { n }, precision];
                self.own(
                    &format!("product/{n}/{precision}/slabwise"),
                    120,
                    &words,
                    &[],
                )
                .fresh = true;
                self.peer(
                    &format!("product/{n}/{precision}/torch"),
                    120,
                    "torch_step.py",
                    &words,
                );
            }
        }
    }

    fn rows(&mut self) {
        for stored in STORED {
            for n in ROWS {
                let words = ["row", if self.quick { "64" } else { n }, stored];
                self.own(&format!("row/{n}/{stored}/slabwise"), 120, &words, &[])
                    .fresh = true;
                if !stored.ends_with("bits") {
                    self.peer(
                        &format!("row/{n}/{stored}/torch"),
                        120,
                        "torch_step.py",
                        &words,
                    );
                }
            }
        }
    }

    fn convolutions(&mut self) {
        for precision in PRECISIONS {
            for (name, [batch, inputs, outputs, image, k, stride]) in CONVOLUTIONS {
                let sizes = if self.quick {
                    [1, inputs.min(8), 8, 8, k, stride]
                } else {
                    [batch, inputs, outputs, image, k, stride]
                };
                let sizes = sizes.map(|n| n.to_string()).join(",");
                self.own(
                    &format!("conv/{name}/{precision}/slabwise"),
                    180,
                    &["conv", &sizes, precision],
                    &[],
                )
                .fresh = true;
                self.peer(
                    &format!("conv/{name}/{precision}/torch"),
                    120,
                    "torch_step.py",
                    &["conv", &sizes, precision],
                );
            }
        }
    }

    /// Each test of each binary.
    fn tests(&mut self) -> Result<Vec<(String, String, PathBuf)>, String> {
        let Some(folder) = &self.places.tests else {
            return Ok(Vec::new());
        };
        let refuse = |e| format!("{}: {e}", folder.display());
        let entries = std::fs::read_dir(folder)
            .map_err(refuse)?
            .collect::<Result<Vec<_>, _>>()
            .map_err(refuse)?;
        let mut binaries: Vec<PathBuf> = entries
            .iter()
            .map(|entry| entry.path())
            .filter(|path| path.is_file())
            .collect();
        binaries.sort();
        let mut found = Vec::new();
        for binary in binaries {
            let family = binary
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            for name in listed(&binary)? {
                let work = Work::Test {
                    binary: binary.clone(),
                    name: name.clone(),
                    within: None,
                };
                self.push(format!("test/{family}/{name}"), 300, work, &ON_A_GPU)
                    .timed = false;
                found.push((family.clone(), name, binary.clone()));
            }
        }
        Ok(found)
    }

    /// A small test of each family of kernels under the vendor's checker, by each of its tools.
    fn sanitized(&mut self, tests: &[(String, String, PathBuf)]) {
        let program = sanitizer();
        for (tool, only) in TOOLS {
            for (family, test) in FAMILIES {
                let found = tests
                    .iter()
                    .find(|(f, name, _)| f == family && name == test);
                let Some((_, name, binary)) = found else {
                    continue;
                };
                if !only.is_empty() && !only.contains(&family) {
                    continue;
                }
                let work = Work::Test {
                    binary: binary.clone(),
                    name: name.clone(),
                    within: Some(Checker {
                        program: program.clone(),
                        tool,
                    }),
                };
                self.push(format!("{tool}/{family}/{name}"), 300, work, &CHECKED)
                    .timed = false;
            }
        }
    }
}

/// The vendor's checker: on the path, or where its toolkit is usually installed.
fn sanitizer() -> PathBuf {
    let name = "compute-sanitizer";
    let path = std::env::var_os("PATH").unwrap_or_default();
    let usual = [
        "/usr/local/cuda/bin",
        "/opt/nvidia/compute-sanitizer",
        "/opt/nvidia/cuda/bin",
    ]
    .map(PathBuf::from);
    let folders = std::env::split_paths(&path).chain(usual);
    folders
        .map(|folder| folder.join(name))
        .find(|file| file.is_file())
        .unwrap_or_else(|| name.into())
}

/// The names of a test binary's tests, without those that run in the processes of others.
fn listed(binary: &Path) -> Result<Vec<String>, String> {
    let ignored = names(binary, &["--ignored"])?;
    let mut all = names(binary, &[])?;
    all.retain(|name| !ignored.contains(name));
    Ok(all)
}

fn names(binary: &Path, which: &[&str]) -> Result<Vec<String>, String> {
    let mut command = Command::new(binary);
    command.args(["--list", "--format", "terse"]).args(which);
    let ended = child::run(command, Duration::from_secs(30));
    if !ended.status.is_some_and(|status| status.success()) {
        let why = ended.refused.clone().unwrap_or_else(|| ended.tail());
        return Err(format!(
            "{} does not list its tests: {why}",
            binary.display()
        ));
    }
    Ok(ended
        .stdout
        .lines()
        .filter_map(|line| line.strip_suffix(": test"))
        .map(String::from)
        .collect())
}

impl Item {
    /// The command that runs it.
    pub fn command(&self) -> Command {
        let mut command = match &self.work {
            Work::Own(words) => {
                let mut command = Command::new(&self.program);
                command.arg("measure").args(words);
                command
            }
            Work::Peer { script, words } => {
                let mut command = Command::new("python3");
                command.arg(script).args(words);
                command
            }
            Work::Test {
                binary,
                name,
                within,
            } => {
                let mut command = match within {
                    Some(checker) => {
                        let mut command = Command::new(&checker.program);
                        command
                            .args(["--tool", checker.tool, "--error-exitcode", "9"])
                            .arg(binary);
                        command
                    }
                    None => Command::new(binary),
                };
                command.args(["--exact", name, "--nocapture", "--test-threads", "1"]);
                command
            }
        };
        command.envs(self.variables.iter().copied());
        command.envs(self.kernels.iter().map(|folder| (CACHE, folder)));
        command
    }

    /// Its command as text for people.
    pub fn shown(&self) -> String {
        let command = self.command();
        let variables = self
            .variables
            .iter()
            .map(|(name, value)| format!("{name}={value}"));
        let file = |path: &std::ffi::OsStr| {
            Path::new(path)
                .file_name()
                .unwrap_or(path)
                .to_string_lossy()
                .into_owned()
        };
        let words = command.get_args().map(|word| {
            if Path::new(word).is_absolute() {
                file(word)
            } else {
                word.to_string_lossy().into()
            }
        });
        variables
            .chain([file(command.get_program())])
            .chain(words)
            .collect::<Vec<_>>()
            .join(" ")
    }
}

/// Whether a name contains a pattern, in which `*` matches any text.
pub fn matches(pattern: &str, name: &str) -> bool {
    let mut rest = name;
    pattern.split('*').all(|part| match rest.find(part) {
        Some(at) => {
            rest = &rest[at + part.len()..];
            true
        }
        None => false,
    })
}

#[cfg(test)]
mod tests {
    use super::{IMAGE_MODELS, MODELS, TORCH_IMAGE_MODES, TORCH_MODES, matches, torch_modes};

    #[test]
    fn patterns_are_parts_of_names() {
        let name = "step/cnn/tf32/torch-graph";
        assert!(
            ["cnn", "step/*torch", "", "*", "step/*/tf32/*graph"]
                .iter()
                .all(|pattern| matches(pattern, name))
        );
        assert!(
            ["resnet", "torch*step", "step/*/f32*jax"]
                .iter()
                .all(|pattern| !matches(pattern, name))
        );
    }

    #[test]
    fn channels_are_last_in_models_of_images_alone() {
        let of_images = |name: &str| torch_modes(name).count() > TORCH_MODES.len();
        let found: Vec<&str> = MODELS
            .iter()
            .map(|(name, ..)| *name)
            .filter(|name| of_images(name))
            .collect();
        assert_eq!(found, IMAGE_MODELS);
        for mode in TORCH_IMAGE_MODES {
            let plain = mode.strip_suffix("-channels-last").expect("its end");
            assert!(TORCH_MODES.contains(&plain), "{mode}");
        }
    }

    #[test]
    fn small_tests_of_families_exist_and_are_packed() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let text = |file: &str| std::fs::read_to_string(root.join(file)).expect("a file");
        let packed = text(".ci/pack-gpu");
        let list = packed.lines().find(|line| line.starts_with("kernels=("));
        let list = list.expect("a list of tests").replace(['(', ')', '='], " ");
        for (family, name) in super::FAMILIES {
            let source = text(&format!("kernels/cuda/tests/{family}.rs"));
            let is_test = source.contains(&format!("#[test]\nfn {name}()"));
            let is_packed = list.split(' ').any(|word| word == family);
            assert!(is_test && is_packed, "{family}, {name}");
        }
        let known = |(_, only): &(&str, &[&str])| {
            let is_family = |of: &&str| super::FAMILIES.iter().any(|(family, _)| family == of);
            only.iter().all(is_family)
        };
        assert!(super::TOOLS.iter().all(known));
    }

    #[test]
    fn the_mark_of_tests_is_the_one_that_they_print() {
        assert_eq!(super::USES_THE_GPU, slabwise_cuda::emulator::USES_THE_GPU);
    }
}
