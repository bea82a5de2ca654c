//! From source to machine code: NVRTC, called for several functions at once.
//!
//! Code is made for one architecture (a *cubin*), not as PTX: so mistakes show here rather than in the driver, and nothing is
//! compiled a second time there. Functions share a program because most of what a small one costs is the start of the compiler.

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::PathBuf;

use cudarc::nvrtc::sys;

use crate::libraries::{Library, Missing};
use crate::lower::Function;

/// A program's text and what it is compiled for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Program {
    /// The whole text.
    pub source: String,
    /// Compute capability, as in `sm_90`.
    pub sm: u32,
}

/// What the compiler made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cubin {
    /// Machine code, as the driver loads it.
    pub image: Vec<u8>,
    /// What each function uses, in the order in which they were compiled.
    pub usage: Vec<Usage>,
}

/// What a function needs of a multiprocessor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// The function.
    pub name: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of registers that a thread writes to memory because it has too few.
    pub spill_bytes: u32,
    /// Bytes of a thread's stack.
    pub stack_bytes: u32,
    /// Bytes of shared memory of a block, without what a launch adds.
    pub shared_bytes: u32,
}

/// Why there is no code.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// There is no compiler.
    #[error(transparent)]
    Missing(#[from] Missing),
    /// The compiler refused the source, which is a mistake of slabwise.
    #[error("NVRTC refused a generated kernel for sm_{sm}; its source{}:\n{log}", saved(.source_file.as_ref()))]
    Refused {
        /// For which architecture.
        sm: u32,
        /// Where the source was saved, with line numbers.
        source_file: Option<PathBuf>,
        /// What the compiler said.
        log: String,
    },
    /// The compiler failed in another way.
    #[error("NVRTC failed in {call}: {code}")]
    Failed {
        /// What was called.
        call: &'static str,
        /// What it answered.
        code: String,
    },
}

fn saved(file: Option<&PathBuf>) -> String {
    file.map_or_else(|| " could not be saved".into(), |file| format!(" is in {}", file.display()))
}

/// The options besides the architecture. They are part of what a cached cubin is known by.
pub const OPTIONS: [&str; 3] = ["--std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v"];

impl Program {
    /// A program of these functions, each once, behind what they share.
    pub fn new<'a>(prelude: &str, functions: impl IntoIterator<Item = &'a Function>, sm: u32) -> Program {
        let mut source = String::from(prelude);
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
        Program { source, sm }
    }
}

/// The compiler's version.
///
/// # Errors
/// If there is none.
pub fn version() -> Result<(u32, u32), Error> {
    Library::Nvrtc.open().map_err(Clone::clone)?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both are valid for writing, and the library is open.
    check("nvrtcVersion", unsafe { sys::nvrtcVersion(&mut major, &mut minor) })?;
    Ok((major as u32, minor as u32))
}

/// Compiles a program.
///
/// # Errors
/// If there is no compiler, or it refuses the source; then the source has been saved.
pub fn compile(program: &Program) -> Result<Cubin, Error> {
    Library::Nvrtc.open().map_err(Clone::clone)?;
    let failed = |call| move |e: std::ffi::NulError| Error::Failed { call, code: e.to_string() };
    let source = CString::new(program.source.as_str()).map_err(failed("nvrtcCreateProgram"))?;
    let architecture = format!("--gpu-architecture=sm_{}", program.sm);
    let options = OPTIONS.iter().copied().chain([architecture.as_str()]).map(CString::new);
    let options = options.collect::<Result<Vec<CString>, _>>().map_err(failed("nvrtcCompileProgram"))?;
    let mut handle = Handle(std::ptr::null_mut());
    // SAFETY: the texts end in 0 and outlive the call, and there are no headers.
    let created =
        unsafe { sys::nvrtcCreateProgram(&mut handle.0, source.as_ptr(), c"slabwise.cu".as_ptr(), 0, std::ptr::null(), std::ptr::null()) };
    check("nvrtcCreateProgram", created)?;
    let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
    // SAFETY: the program was created, and the texts end in 0 and outlive the call.
    let compiled = unsafe { sys::nvrtcCompileProgram(handle.0, pointers.len() as c_int, pointers.as_ptr()) };
    let log = handle.log()?;
    if compiled == sys::nvrtcResult::NVRTC_ERROR_COMPILATION {
        return Err(Error::Refused { sm: program.sm, source_file: save(&program.source), log });
    }
    check("nvrtcCompileProgram", compiled)?;
    Ok(Cubin { image: handle.image()?, usage: usages(&log) })
}

/// A program of the compiler.
struct Handle(sys::nvrtcProgram);

impl Handle {
    fn log(&self) -> Result<String, Error> {
        let mut bytes = 0;
        // SAFETY: the program was created, and the count is valid for writing.
        check("nvrtcGetProgramLogSize", unsafe { sys::nvrtcGetProgramLogSize(self.0, &mut bytes) })?;
        let mut log = vec![0u8; bytes];
        // SAFETY: the log is as long as the compiler said.
        check("nvrtcGetProgramLog", unsafe { sys::nvrtcGetProgramLog(self.0, log.as_mut_ptr().cast()) })?;
        Ok(CStr::from_bytes_until_nul(&log).map(|l| l.to_string_lossy().into_owned()).unwrap_or_default())
    }

    fn image(&self) -> Result<Vec<u8>, Error> {
        let mut bytes = 0;
        // SAFETY: the program was compiled, and the count is valid for writing.
        check("nvrtcGetCUBINSize", unsafe { sys::nvrtcGetCUBINSize(self.0, &mut bytes) })?;
        let mut image = vec![0u8; bytes];
        // SAFETY: the image is as long as the compiler said.
        check("nvrtcGetCUBIN", unsafe { sys::nvrtcGetCUBIN(self.0, image.as_mut_ptr().cast()) })?;
        Ok(image)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: it was created and is destroyed only here.
            unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
        }
    }
}

fn check(call: &'static str, result: sys::nvrtcResult) -> Result<(), Error> {
    if result == sys::nvrtcResult::NVRTC_SUCCESS { Ok(()) } else { Err(Error::Failed { call, code: format!("{result:?}") }) }
}

/// Writes a refused source to a file of its own, each line behind its number.
fn save(source: &str) -> Option<PathBuf> {
    let numbered: String = source.lines().enumerate().map(|(at, line)| format!("{:5}  {line}\n", at + 1)).collect();
    static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let count = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let file = std::env::temp_dir().join(format!("slabwise-refused-{}-{count}.cu", std::process::id()));
    // Whoever could make a file of this name first, or a link, would choose what it is written to.
    let mut fresh = std::fs::OpenOptions::new().write(true).create_new(true).open(&file).ok()?;
    std::io::Write::write_all(&mut fresh, numbered.as_bytes()).ok()?;
    Some(file)
}

/// Reads what each function uses from the assembler's notes.
fn usages(log: &str) -> Vec<Usage> {
    let mut found: Vec<Usage> = Vec::new();
    let before =
        |line: &str, word: &str| -> Option<u32> { line[..line.find(word)?].split([' ', ',']).rfind(|w| !w.is_empty())?.parse().ok() };
    for line in log.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            found.push(Usage { name: rest.split('\'').next().unwrap_or_default().into(), ..Usage::default() });
        }
        let Some(last) = found.last_mut() else { continue };
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
    fn the_notes_of_the_assembler_are_read() {
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
        let first = Usage { name: "first".into(), registers: 32, spill_bytes: 12, stack_bytes: 16, shared_bytes: 1024 };
        let second = Usage { name: "second".into(), registers: 8, ..Usage::default() };
        assert_eq!(usages(log), [first, second]);
    }

    #[test]
    fn a_function_is_in_a_program_once() {
        let function = |name: &str| Function { name: name.into(), source: format!("void {name}() {{}}") };
        let functions = [function("a"), function("b"), function("a")];
        let program = Program::new("// shared", &functions, 90);
        assert_eq!(program.source, "// shared\nvoid a() {}\nvoid b() {}\n");
    }
}
