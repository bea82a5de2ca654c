//! The paths of dumps: the folder of a program, and the files of CUDA functions.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// Most characters of a program's name in the name of its folder.
const NAME_MAX: usize = 64;

/// Makes a new folder for a program inside of another: a number and the program's name.
///
/// # Errors
/// If the system cannot make it.
pub fn program_folder(root: &Path, program: &str) -> std::io::Result<PathBuf> {
    static PROGRAMS: AtomicU32 = AtomicU32::new(0);
    let plain = |c: char| match c.is_alphanumeric() || c == '-' {
        true => c,
        false => '_',
    };
    let name: String = program.chars().map(plain).take(NAME_MAX).collect();
    let number = PROGRAMS.fetch_add(1, Ordering::Relaxed);
    let folder = root.join(format!("{number:03}-{name}"));
    fs::create_dir_all(&folder)?;
    Ok(folder)
}

/// The file that the source of a CUDA function is written to.
pub fn source_file(source: &str) -> String {
    format!("#include \"prelude.cuh\"\n\n{source}")
}
