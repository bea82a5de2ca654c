//! NVRTC: compiles CUDA source to machine code.
//!
//! Code is compiled for one architecture (a *cubin*), not as PTX, so that mistakes appear here
//! rather than in the driver, and nothing is compiled a second time there. PTX, which the driver
//! compiles, is generated only for a device that is newer than the compiler.

mod calls;
mod headers;

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use calls::Calls;
pub use headers::PrecompiledHeaders;

use crate::abi::Function;
use crate::libraries::{Library, Missing};

/// The file that sources include the prelude as.
const PRELUDE_FILE: &str = "prelude.cuh";

/// The source of a program and the architecture that it is compiled for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Program {
    /// The names of its functions, for messages.
    pub names: String,
    /// The declarations that programs share.
    pub prelude: &'static str,
    /// The text, which includes the prelude as `prelude.cuh`.
    pub source: String,
    /// Compute capability, as in `sm_90`.
    pub sm: u32,
}

/// The output of the compiler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cubin {
    /// Machine code, or PTX that ends in 0, in the form that the driver loads.
    pub image: Vec<u8>,
    /// The resources of each function, in the order of compilation; empty for PTX.
    pub usage: Vec<Usage>,
}

/// The resources of a multiprocessor that a function uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// The function.
    pub name: String,
    /// Registers per thread.
    pub registers: u32,
    /// Bytes of registers that a thread spills to memory because it has too few.
    pub spill_bytes: u32,
    /// Bytes of a thread's stack.
    pub stack_bytes: u32,
    /// Bytes of static shared memory per block; a launch may add dynamic shared memory.
    pub shared_bytes: u32,
}

/// Why a program was not compiled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// NVRTC is missing.
    #[error(transparent)]
    Missing(#[from] Missing),
    /// The compiler refused the source, which is a bug in slabwise, or in the code of a custom
    /// kernel: then the log names that kernel and the lines of its code.
    #[error("NVRTC refused the generated kernel {names} for sm_{sm}; its source{}:\n{log}", saved(.source_file.as_ref()))]
    Refused {
        /// The functions of the program.
        names: String,
        /// The target architecture.
        sm: u32,
        /// The file in which the source was saved, with line numbers.
        source_file: Option<PathBuf>,
        /// The compiler's log.
        log: String,
    },
    /// The compiler generates no code that the device runs.
    #[error("NVRTC {}.{} makes no code for sm_{sm}, only for {}; {}", version.0, version.1, listed(known), other_compiler(*sm))]
    Architecture {
        /// The device's compute capability.
        sm: u32,
        /// The compiler's version.
        version: (u32, u32),
        /// The compute capabilities that it generates code for.
        known: Vec<u32>,
    },
    /// The compiler lacks options or architectures that kernels need.
    #[error("NVRTC {}.{} is older than the {}.0 that is needed; pip install nvidia-cuda-nvrtc==13.0.88 (nvidia-cuda-nvrtc-cu12 for a driver of CUDA 12), or name the file of a newer one in SLABWISE_LIBNVRTC", found.0, found.1, OLDEST_MAJOR)]
    TooOld {
        /// The compiler's version.
        found: (u32, u32),
    },
    /// Another call of the compiler failed.
    #[error("NVRTC failed in {call}: {code}")]
    Failed {
        /// The call.
        call: &'static str,
        /// The status that it returned.
        code: String,
    },
}

fn saved(file: Option<&PathBuf>) -> String {
    file.map_or_else(
        || " could not be saved".into(),
        |file| format!(" is in {}", file.display()),
    )
}

fn listed(known: &[u32]) -> String {
    known
        .iter()
        .map(|sm| format!("sm_{sm}"))
        .collect::<Vec<_>>()
        .join(", ")
}

fn other_compiler(sm: u32) -> &'static str {
    match sm >= OLDEST {
        true => {
            "install a newer one: pip install --upgrade nvidia-cuda-nvrtc, or name its file in SLABWISE_LIBNVRTC"
        }
        false => "slabwise needs a device of sm_80 or newer",
    }
}

/// The oldest compute capability that kernels are written for.
const OLDEST: u32 = 80;

/// The oldest major version of the compiler that kernels are written for.
const OLDEST_MAJOR: u32 = 12;

/// The first architecture whose kernels can wait for their dependencies themselves (programmatic
/// launch): the prelude has that instruction from here on.
const WAITS: u32 = 90;

/// The compiler options besides the architecture, for a compiler of this version. They are part of
/// the key of a cached cubin.
///
/// The compiler does not fuse multiplications with additions by itself, because whether it did
/// would depend on the surrounding code, and the same operations would give other bits in another
/// kernel. Kernels request fused operations by name. From version 12.4 on the compiler can leave
/// out textures and the runtime functions for device code, which takes a third off the parsing
/// time.
pub fn options(version: (u32, u32)) -> Vec<&'static str> {
    let mut options = vec![
        "--std=c++17",
        "--device-as-default-execution-space",
        "--fmad=false",
        "--ptxas-options=-v",
    ];
    if version >= (12, 4) {
        options.push("--minimal");
    }
    options
}

/// The form in which the compiler generates code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// Machine code for this compute capability.
    Machine(u32),
    /// PTX for this compute capability, which the driver compiles for a newer device.
    Ptx(u32),
}

impl Architecture {
    /// Whether kernels compiled for it wait for their dependencies themselves.
    pub fn waits(self) -> bool {
        let (Architecture::Machine(sm) | Architecture::Ptx(sm)) = self;
        sm >= WAITS
    }
}

impl Program {
    /// A program of these functions, each included once, after their shared prelude.
    pub fn new<'a>(
        prelude: &'static str,
        functions: impl IntoIterator<Item = &'a Function>,
        sm: u32,
    ) -> Program {
        let mut source = format!("#include \"{PRELUDE_FILE}\"\n");
        let mut names = Vec::new();
        for function in functions {
            if names.contains(&&function.name) {
                continue;
            }
            names.push(&function.name);
            source.push('\n');
            source.push_str(&function.source);
        }
        source.push('\n');
        let names = names
            .iter()
            .map(|name| name.as_str())
            .collect::<Vec<_>>()
            .join(", ");
        Program {
            names,
            prelude,
            source,
            sm,
        }
    }

    /// Whether the code may depend on files, which the code of a custom kernel can include or ask
    /// for: whether it has `include` after the line of the prelude.
    pub(crate) fn may_read_files(&self) -> bool {
        let own = self.source.split_once('\n').map_or("", |(_, own)| own);
        // A line that ends in a backslash goes on in the next.
        let joined = own.replace("\\\r\n", "").replace("\\\n", "");
        joined.contains("include")
    }

    /// One program per function.
    pub fn each<'a>(
        prelude: &'static str,
        functions: impl IntoIterator<Item = &'a Function>,
        sm: u32,
    ) -> Vec<Program> {
        functions
            .into_iter()
            .map(|function| Program::new(prelude, [function], sm))
            .collect()
    }
}

/// A text that differs between builds of the compiler of one version: the length of its file, which
/// is the same on every machine; empty where it is not known.
pub(crate) fn build() -> &'static str {
    static BUILD: OnceLock<String> = OnceLock::new();
    BUILD.get_or_init(|| {
        let open = Library::Nvrtc.open().ok();
        let file = open.and_then(|open| crate::libraries::path_of(&open.file));
        file.and_then(|file| build_of(&file)).unwrap_or_default()
    })
}

fn build_of(file: &Path) -> Option<String> {
    let meta = file.metadata().ok()?;
    Some(format!("{} bytes", meta.len()))
}

/// Fails for versions of the compiler that are too old.
pub(crate) fn suffices(found: (u32, u32)) -> Result<(), Error> {
    match found.0 < OLDEST_MAJOR {
        true => Err(Error::TooOld { found }),
        false => Ok(()),
    }
}

/// The compiler's version.
///
/// # Errors
/// If there is none.
pub fn version() -> Result<(u32, u32), Error> {
    Calls::bound()?.version()
}

/// The architecture to compile for on a device of compute capability `sm`: its own, or the newest
/// older one of its generation, whose code it runs as well. For a generation that the compiler does
/// not know it is PTX for the newest architecture before it.
///
/// # Errors
/// If there is no compiler, or it generates nothing that the device runs.
pub fn architecture(sm: u32) -> Result<Architecture, Error> {
    let calls = Calls::bound()?;
    let known = calls.architectures()?;
    nearest(sm, &known).ok_or(Error::Architecture {
        sm,
        version: calls.version()?,
        known,
    })
}

fn nearest(sm: u32, known: &[u32]) -> Option<Architecture> {
    let before = |generation: bool| {
        known
            .iter()
            .copied()
            .filter(|&k| k <= sm && (!generation || k / 10 == sm / 10))
            .max()
    };
    let ptx = || {
        before(false)
            .filter(|&k| k >= OLDEST)
            .map(Architecture::Ptx)
    };
    before(true).map(Architecture::Machine).or_else(ptx)
}

/// Compiles a program. With `headers`, the prelude is parsed once for all programs that are compiled
/// with them.
///
/// # Errors
/// If there is no compiler, or it refuses the source, which has then been saved to a file.
pub fn compile(program: &Program, headers: Option<&PrecompiledHeaders>) -> Result<Cubin, Error> {
    let architecture = architecture(program.sm)?;
    let handle = compiled(program, architecture, headers)?;
    Ok(match architecture {
        Architecture::Machine(_) => Cubin {
            image: handle.image()?,
            usage: usages(&handle.log()?),
        },
        Architecture::Ptx(_) => Cubin {
            image: handle.ptx()?,
            usage: Vec::new(),
        },
    })
}

/// The PTX that the compiler generates before assembling, for reading.
///
/// # Errors
/// See [`compile`].
pub fn ptx(program: &Program) -> Result<String, Error> {
    let (Architecture::Machine(sm) | Architecture::Ptx(sm)) = architecture(program.sm)?;
    // No machine code, which takes longer than all before it.
    let handle = compiled(program, Architecture::Ptx(sm), None)?;
    handle.ptx().map(text)
}

fn compiled(
    program: &Program,
    architecture: Architecture,
    headers: Option<&PrecompiledHeaders>,
) -> Result<Handle, Error> {
    let handle = Handle::new(program)?;
    let option = match architecture {
        Architecture::Machine(sm) => format!("--gpu-architecture=sm_{sm}"),
        Architecture::Ptx(sm) => format!("--gpu-architecture=compute_{sm}"),
    };
    let mut options: Vec<String> = options(handle.calls.version()?)
        .into_iter()
        .map(String::from)
        .collect();
    options.push(option);
    let more = headers.and_then(PrecompiledHeaders::options);
    let status = handle.compile(options.iter().chain(more.iter().flatten()))?;
    if status == 0 {
        return Ok(handle);
    }
    if let (Some(headers), Some(_)) = (headers, more) {
        // The reason may be the headers: their folder is full, or gone.
        headers.disable();
        return compiled(program, architecture, None);
    }
    if status == calls::REFUSED {
        return Err(Error::Refused {
            names: program.names.clone(),
            sm: program.sm,
            source_file: save(program),
            log: handle.log()?,
        });
    }
    handle.calls.check("nvrtcCompileProgram", status)?;
    Ok(handle)
}

/// A program object of the compiler.
struct Handle {
    calls: &'static Calls,
    raw: calls::Raw,
}

/// A text that ends in 0.
fn c_string(call: &'static str, text: &str) -> Result<CString, Error> {
    CString::new(text).map_err(|e| Error::Failed {
        call,
        code: e.to_string(),
    })
}

impl Handle {
    fn new(program: &Program) -> Result<Handle, Error> {
        const CREATE: &str = "nvrtcCreateProgram";
        let mut handle = Handle {
            calls: Calls::bound()?,
            raw: std::ptr::null_mut(),
        };
        let [source, prelude, file] =
            [&program.source, program.prelude, PRELUDE_FILE].map(|text| c_string(CREATE, text));
        let (source, prelude, file) = (source?, prelude?, file?);
        let (headers, files) = (prelude.as_ptr(), file.as_ptr());
        // SAFETY: the texts end in 0 and outlive the call, and so do the one header and its name.
        handle.calls.check(CREATE, unsafe {
            let name = c"slabwise.cu".as_ptr();
            (handle.calls.create)(&mut handle.raw, source.as_ptr(), name, 1, &headers, &files)
        })?;
        Ok(handle)
    }

    /// Compiles the program, and returns the status.
    fn compile<'a>(
        &self,
        options: impl Iterator<Item = &'a String>,
    ) -> Result<calls::Status, Error> {
        let options = options
            .map(|option| c_string("nvrtcCompileProgram", option))
            .collect::<Result<Vec<CString>, Error>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        // SAFETY: the program was created, and the texts end in 0 and outlive the call.
        Ok(unsafe { (self.calls.compile)(self.raw, pointers.len() as c_int, pointers.as_ptr()) })
    }

    fn log(&self) -> Result<String, Error> {
        self.bytes("nvrtcGetProgramLog", self.calls.log_bytes, self.calls.log)
            .map(text)
    }

    /// PTX, which ends in 0.
    fn ptx(&self) -> Result<Vec<u8>, Error> {
        self.bytes("nvrtcGetPTX", self.calls.ptx_bytes, self.calls.ptx)
    }

    fn image(&self) -> Result<Vec<u8>, Error> {
        self.bytes("nvrtcGetCUBIN", self.calls.cubin_bytes, self.calls.cubin)
    }

    /// The bytes that the call `call` writes, after `count` has said how many there are.
    fn bytes(
        &self,
        call: &'static str,
        count: calls::Count,
        write: calls::Write,
    ) -> Result<Vec<u8>, Error> {
        let mut bytes = 0;
        // SAFETY: the program was created, and the count is valid for writing.
        let status = unsafe { count(self.raw, &mut bytes) };
        self.calls.check(call, status)?;
        let mut written = vec![0u8; bytes];
        // SAFETY: there is as much room as the compiler said.
        self.calls.check(call, unsafe {
            write(self.raw, written.as_mut_ptr().cast())
        })?;
        Ok(written)
    }
}

/// The bytes as text, without the 0 at the end.
fn text(bytes: Vec<u8>) -> String {
    CStr::from_bytes_until_nul(&bytes)
        .map(|text| text.to_string_lossy().into_owned())
        .unwrap_or_default()
}

impl Drop for Handle {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: it was created and is destroyed only here.
            unsafe { (self.calls.destroy)(&mut self.raw) };
        }
    }
}

/// Writes a refused source and its prelude to a new file, with line numbers.
fn save(program: &Program) -> Option<PathBuf> {
    let numbered = |text: &str| -> String {
        text.lines()
            .enumerate()
            .map(|(at, line)| format!("{:5}  {line}\n", at + 1))
            .collect()
    };
    let text = format!(
        "{}\n{PRELUDE_FILE}:\n{}",
        numbered(&program.source),
        numbered(program.prelude)
    );
    static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let count = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let file = std::env::temp_dir().join(format!(
        "slabwise-refused-{}-{count}.cu",
        std::process::id()
    ));
    // Must not exist yet: a process that created this file or a link first would choose its target.
    let mut fresh = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(&file)
        .ok()?;
    std::io::Write::write_all(&mut fresh, text.as_bytes()).ok()?;
    Some(file)
}

/// Parses the resources of each function from the assembler's notes.
fn usages(log: &str) -> Vec<Usage> {
    let mut found: Vec<Usage> = Vec::new();
    let before = |line: &str, word: &str| -> Option<u32> {
        line[..line.find(word)?]
            .split([' ', ','])
            .rfind(|w| !w.is_empty())?
            .parse()
            .ok()
    };
    for line in log.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            found.push(Usage {
                name: rest.split('\'').next().unwrap_or_default().into(),
                ..Usage::default()
            });
        }
        let Some(last) = found.last_mut() else {
            continue;
        };
        if let Some(bytes) = before(line, " bytes stack frame") {
            last.stack_bytes = bytes;
            last.spill_bytes = before(line, " bytes spill stores").unwrap_or(0);
        }
        if let Some(registers) = before(line, " registers") {
            last.registers = registers;
            last.shared_bytes = before(line, " bytes smem").unwrap_or(0);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_assembler_log_is_parsed() {
        let log = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90'
ptxas info    : Function properties for first
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 16 bytes cumulative stack size, 1024 bytes smem
ptxas info    : Compile time = 1.000 ms
ptxas info    : Compiling entry function 'second' for 'sm_90'
ptxas info    : Function properties for second
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
";
        let first = Usage {
            name: "first".into(),
            registers: 32,
            spill_bytes: 12,
            stack_bytes: 16,
            shared_bytes: 1024,
        };
        let second = Usage {
            name: "second".into(),
            registers: 8,
            ..Usage::default()
        };
        assert_eq!(usages(log), [first, second]);
    }

    #[test]
    fn an_unknown_device_gets_code_of_its_generation_or_ptx() {
        let known = vec![75, 80, 86, 89, 90, 100, 103, 120, 121];
        let of = [80, 89, 90, 104, 121, 129].map(|sm| nearest(sm, &known));
        assert_eq!(
            of,
            [80, 89, 90, 103, 121, 121].map(|k| Some(Architecture::Machine(k)))
        );
        let of = [110, 130].map(|sm| nearest(sm, &known));
        assert_eq!(of, [103, 121].map(|k| Some(Architecture::Ptx(k))));
        // A device that is too old gets PTX that is too old.
        assert_eq!(
            [
                nearest(70, &known),
                nearest(76, &[75, 80]),
                nearest(130, &[75]),
                nearest(80, &[90])
            ],
            [None, Some(Architecture::Machine(75)), None, None]
        );
        // Its kernels wait for others only from sm_90 on, whatever the device is.
        let waits = [
            Architecture::Machine(89),
            Architecture::Ptx(80),
            Architecture::Ptx(90),
            Architecture::Machine(120),
        ];
        assert_eq!(waits.map(Architecture::waits), [false, false, true, true]);
        let said = |sm| {
            Error::Architecture {
                sm,
                version: (13, 0),
                known: vec![75],
            }
            .to_string()
        };
        assert_eq!(
            said(130),
            "NVRTC 13.0 makes no code for sm_130, only for sm_75; install a newer one: pip install --upgrade nvidia-cuda-nvrtc, or name its file in SLABWISE_LIBNVRTC"
        );
        assert!(said(70).ends_with("slabwise needs a device of sm_80 or newer"));
    }

    #[test]
    fn builds_differ_in_their_files() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("libnvrtc.so.13");
        let build_with = |text: &str| {
            std::fs::write(&file, text).expect("own folder");
            build_of(&file).expect("it is there")
        };
        // A copy of the same build shares the cache, such as one that is shipped with its kernels.
        assert_eq!(build_with("one"), build_with("two"));
        assert_ne!(build_with("one"), build_with("three"));
        assert_eq!(build_of(&folder.path().join("none")), None);
        // Where the compiler is found, its build is known.
        assert_eq!(version().is_ok(), !build().is_empty());
    }

    #[test]
    fn a_compiler_that_is_too_old_is_refused() {
        assert_eq!((suffices((12, 0)), suffices((13, 1))), (Ok(()), Ok(())));
        let error = suffices((11, 8)).expect_err("it is too old").to_string();
        assert!(
            error.starts_with("NVRTC 11.8 is older than the 12.0 that is needed; pip install"),
            "{error}"
        );
    }

    #[test]
    fn a_program_contains_each_function_once() {
        let function = |name: &str| Function {
            name: name.into(),
            source: format!("void {name}() {{}}"),
        };
        let functions = [function("a"), function("b"), function("a")];
        let program = Program::new("// shared", &functions, 90);
        assert_eq!(program.prelude, "// shared");
        assert_eq!(
            program.source,
            "#include \"prelude.cuh\"\n\nvoid a() {}\nvoid b() {}\n"
        );
        assert_eq!(program.names, "a, b");
    }
}
