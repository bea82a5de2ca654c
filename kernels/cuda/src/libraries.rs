//! NVIDIA's libraries: located at run time, never required.
//!
//! A binary must start on a machine that has none of them. Therefore each library is located before
//! the first call that needs it, in this order: the file that its environment variable names, the
//! loader's own path, the usual folders of the CUDA toolkit and the driver, and the `nvidia-*`
//! wheels of the active Python environment. The library is opened by its path and stays open. Calls
//! of NVRTC and cuDNN are bound to that file; bindings of the others look the library up by name,
//! which must yield the file that is open.

use std::ffi::{CStr, OsString, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::ptr::null;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// A library that slabwise can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Library {
    /// The driver, which comes with the operating system's NVIDIA package.
    Driver,
    /// The compiler of kernels at run time.
    Nvrtc,
    /// Matrix products tuned by the vendor.
    CublasLt,
    /// Convolutions tuned by the vendor.
    Cudnn,
}

/// Where a library was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Location {
    /// The path that the library's variable names.
    Variable,
    /// On the loader's path.
    Loader,
    /// A folder where the toolkit or the driver is usually installed.
    Toolkit,
    /// A wheel of the active Python environment.
    Wheel,
}

/// A library that is open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadedLibrary {
    /// The file, or the name that the loader knew.
    pub file: PathBuf,
    /// Where it was found.
    pub location: Location,
}

/// A library that was not found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} was not found{why}; {}", library.name(), library.advice())]
pub struct Missing {
    /// The library.
    pub library: Library,
    /// The locations that were tried, if that helps.
    pub why: String,
}

/// Why a library did not do a requested operation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LibraryError {
    /// The library is missing.
    #[error(transparent)]
    Missing(#[from] Missing),
    /// A call failed.
    #[error("{call} answered {status}{}", library.doing_without())]
    Failed {
        /// The library that was called.
        library: Library,
        /// The call.
        call: &'static str,
        /// The library's name for the failure.
        status: String,
    },
}

impl LibraryError {
    /// The library that was called or is missing.
    pub fn library(&self) -> Library {
        match self {
            LibraryError::Missing(missing) => missing.library,
            LibraryError::Failed { library, .. } => *library,
        }
    }
}

impl Library {
    /// All libraries, in the order in which they are needed.
    pub const ALL: [Library; 4] = [
        Library::Driver,
        Library::Nvrtc,
        Library::CublasLt,
        Library::Cudnn,
    ];

    /// The library's name, as NVIDIA writes it.
    pub fn name(self) -> &'static str {
        match self {
            Library::Driver => "the CUDA driver (libcuda)",
            Library::Nvrtc => "NVRTC (libnvrtc)",
            Library::CublasLt => "cuBLASLt (libcublasLt)",
            Library::Cudnn => "cuDNN (libcudnn)",
        }
    }

    /// The environment variable that names its file or its folder.
    pub fn variable(self) -> &'static str {
        match self {
            Library::Driver => "SLABWISE_LIBCUDA",
            Library::Nvrtc => "SLABWISE_LIBNVRTC",
            Library::CublasLt => "SLABWISE_LIBCUBLASLT",
            Library::Cudnn => "SLABWISE_LIBCUDNN",
        }
    }

    /// Advice for the case that it is missing.
    pub fn advice(self) -> &'static str {
        match self {
            Library::Driver => {
                "install NVIDIA's driver, version 580 or newer, or name its file in SLABWISE_LIBCUDA"
            }
            Library::Nvrtc => {
                "pip install nvidia-cuda-nvrtc==13.0.88 (nvidia-cuda-nvrtc-cu12 for a driver of CUDA 12), or install the CUDA toolkit, or name the file in SLABWISE_LIBNVRTC"
            }
            Library::CublasLt => {
                "it is optional: pip install nvidia-cublas (nvidia-cublas-cu12 for a driver of CUDA 12), or install the CUDA toolkit"
            }
            Library::Cudnn => {
                "it is optional: pip install nvidia-cudnn-cu13 (nvidia-cudnn-cu12 for a driver of CUDA 12), or name its file in SLABWISE_LIBCUDNN"
            }
        }
    }

    /// How to do without the library, where that is possible.
    fn doing_without(self) -> &'static str {
        match self {
            Library::Driver | Library::Nvrtc => "",
            Library::CublasLt => "; SLABWISE_AUTOTUNE=0 leaves cuBLASLt out",
            Library::Cudnn => "; SLABWISE_CUDNN=0 leaves cuDNN out",
        }
    }

    /// Opens the library and binds its calls, for the rest of the process. `bind` receives the
    /// library and the file, for its errors.
    pub(crate) fn bind<C>(
        self,
        bind: impl FnOnce(&libloading::Library, std::path::Display<'_>) -> Result<C, String>,
    ) -> Result<C, Missing> {
        let found = self.open().map_err(Clone::clone)?;
        let file = found.file.display();
        // SAFETY: the library is open already, under this name.
        let calls = unsafe { libloading::Library::new(&found.file) }
            .map_err(|e| format!(": {file} cannot be opened: {e}"))
            .and_then(|library| {
                let calls = bind(&library, file)?;
                std::mem::forget(library);
                Ok(calls)
            });
        calls.map_err(|why| Missing { library: self, why })
    }

    /// Opens the library for bindings that look it up by its name, and checks that they reach the
    /// same file, which has these calls. `bound` is the address of the first as they have it, if
    /// they find a library.
    pub(crate) fn bind_by_name<const N: usize>(
        self,
        calls: [&CStr; N],
        bound: impl FnOnce() -> Option<*const c_void>,
    ) -> Result<(), Missing> {
        self.bind(|library, file| {
            let mut addresses = [null(); N];
            for (address, call) in addresses.iter_mut().zip(calls) {
                // SAFETY: addresses are compared alone.
                let found = unsafe { library.get::<*const c_void>(call.to_bytes_with_nul()) };
                *address = *found.map_err(|e| format!(": {file} lacks a call: {e}"))?;
            }
            match bound() {
                Some(bound) if addresses.first() == Some(&bound) => Ok(()),
                Some(_) => Err(format!(
                    ": by its name the loader finds another library than {file}, such as one of a toolkit's folder `stubs`; take that folder out of LD_LIBRARY_PATH"
                )),
                None => Err(format!(
                    ": {file} is open, but the loader does not find it by its name; put its folder into LD_LIBRARY_PATH"
                )),
            }
        })
    }

    /// Its possible file names, the best first. Major versions of NVRTC and cuBLASLt are those
    /// whose code a driver of 12 or 13 accepts: none newer than the driver's, if that is known.
    fn files(self, driver: Option<u32>) -> &'static [&'static str] {
        let is_older = driver.is_some_and(|major| major < 13);
        match self {
            Library::CublasLt if is_older => &["libcublasLt.so.12", "libcublasLt.so"],
            Library::Nvrtc if is_older => &["libnvrtc.so.12", "libnvrtc.so"],
            Library::Driver => &["libcuda.so.1", "libcuda.so", "nvcuda.dll"],
            Library::Nvrtc => &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
            Library::CublasLt => &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
            Library::Cudnn => &["libcudnn.so.9"],
        }
    }

    /// Fails if the library is of a newer major version of CUDA than the driver that was started,
    /// which refuses the calls that it then makes.
    pub(crate) fn suits_driver(self, major: usize) -> Result<(), Missing> {
        match driver_major() {
            Some(driver) if (driver as usize) < major => {
                let file = self.open().map_err(Clone::clone)?.file.display();
                Err(Missing {
                    library: self,
                    why: format!(": {file} is of CUDA {major}, newer than the driver's {driver}"),
                })
            }
            _ => Ok(()),
        }
    }

    /// Libraries that this library opens by name and that must therefore be open before it, in its
    /// own folder: prefixes of file names.
    fn companions(self) -> &'static [&'static str] {
        match self {
            Library::Nvrtc => &["libnvrtc-builtins.so."],
            // cuDNN finds its parts in its own folder by itself.
            Library::Driver | Library::CublasLt | Library::Cudnn => &[],
        }
    }

    /// Finds and opens the library, once for the process.
    ///
    /// # Errors
    /// If it is not found, or the file that the variable names cannot be opened.
    pub fn open(self) -> Result<&'static LoadedLibrary, &'static Missing> {
        OPENED[self as usize]
            .get_or_init(|| find(self, &Surroundings::of_this_process()))
            .as_ref()
    }

    /// Uses this file as the library, as if its variable named it; for tests, which cannot set
    /// variables. Has no effect if the library has been located before.
    #[cfg(feature = "emulator")]
    pub(crate) fn open_as(self, file: &Path) -> Result<&'static LoadedLibrary, &'static Missing> {
        let named = |name: &str| (name == self.variable()).then(|| file.as_os_str().to_owned());
        OPENED[self as usize]
            .get_or_init(|| {
                find(
                    self,
                    &Surroundings {
                        variable: &named,
                        python: &Vec::new,
                        roots: &[],
                        driver: None,
                    },
                )
            })
            .as_ref()
    }
}

impl fmt::Display for LoadedLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let location = match self.location {
            Location::Variable => "named by a variable",
            Location::Loader => "on the loader's path",
            Location::Toolkit => "installed",
            Location::Wheel => "in a Python wheel",
        };
        write!(f, "{} ({location})", self.file.display())
    }
}

/// The libraries that were found.
static OPENED: [OnceLock<Result<LoadedLibrary, Missing>>; Library::ALL.len()] =
    [const { OnceLock::new() }; Library::ALL.len()];

/// The major version of the driver, once it was started; 0 before.
static DRIVER_MAJOR: AtomicU32 = AtomicU32::new(0);

/// Records the major version of the driver that was started, before other libraries are opened.
pub(crate) fn set_driver_major(major: u32) {
    DRIVER_MAJOR.store(major, Ordering::Relaxed);
}

fn driver_major() -> Option<u32> {
    Some(DRIVER_MAJOR.load(Ordering::Relaxed)).filter(|&major| major > 0)
}

/// The environment of the search, besides the file system.
struct Surroundings<'a> {
    variable: &'a dyn Fn(&str) -> Option<OsString>,
    /// Folders of Python packages, as an interpreter on the path names them.
    python: &'a dyn Fn() -> Vec<PathBuf>,
    /// The usual installation roots.
    roots: &'a [&'a str],
    /// The major version of the driver, if it is known.
    driver: Option<u32>,
}

impl Surroundings<'_> {
    fn of_this_process() -> Self {
        const ROOTS: &[&str] = &[
            "/usr/local/cuda",
            "/opt/cuda",
            "/usr/local/nvidia",
            "/usr/lib/x86_64-linux-gnu",
            "/usr/lib64",
            "/usr/lib/wsl/lib",
        ];
        Surroundings {
            variable: &|name| std::env::var_os(name).filter(|value| !value.is_empty()),
            python: &python_packages,
            roots: ROOTS,
            driver: driver_major(),
        }
    }

    /// Folders in which a toolkit keeps libraries.
    fn toolkits(&self) -> Vec<PathBuf> {
        let named = ["CUDA_HOME", "CUDA_PATH"]
            .iter()
            .filter_map(|v| (self.variable)(v))
            .map(PathBuf::from);
        let roots: Vec<PathBuf> = named.chain(self.roots.iter().map(PathBuf::from)).collect();
        roots
            .iter()
            .flat_map(|root| {
                ["lib64", "lib", "targets/x86_64-linux/lib", ""].map(|sub| root.join(sub))
            })
            .collect()
    }

    /// Library folders of the wheels in an environment's packages: `nvidia/cu13/lib`,
    /// `nvidia/cuda_nvrtc/lib`, ….
    fn wheels(&self) -> impl Iterator<Item = PathBuf> + '_ {
        let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"]
            .into_iter()
            .filter_map(|v| (self.variable)(v))
            .map(PathBuf::from);
        let packages = environments.flat_map(|root| {
            let versions = entries(&root.join("lib"))
                .into_iter()
                .filter(|p| name_starts(p, "python3"));
            versions
                .map(|version| version.join("site-packages"))
                .collect::<Vec<_>>()
        });
        let others = std::iter::once_with(|| (self.python)()).flatten();
        packages
            .chain(others)
            .flat_map(|packages| entries(&packages.join("nvidia")))
            .map(|wheel| wheel.join("lib"))
    }
}

/// The entries of a folder in reverse order of names, so that newer versions come before older
/// ones.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .collect();
    found.sort();
    found.reverse();
    found
}

fn name_starts(path: &Path, with: &str) -> bool {
    path.file_name()
        .is_some_and(|name| name.to_string_lossy().starts_with(with))
}

/// The package folders of the interpreter that a user's shell would start. Queried only when all
/// other locations have failed.
fn python_packages() -> Vec<PathBuf> {
    const ASK: &str = "import site, sysconfig; print('\\n'.join({*sysconfig.get_paths().values(), site.getusersitepackages()}))";
    let output = Command::new("python3")
        .args(["-I", "-c", ASK])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output();
    let Ok(answer) = output else {
        return Vec::new();
    };
    let mut folders: Vec<PathBuf> = String::from_utf8_lossy(&answer.stdout)
        .lines()
        .map(PathBuf::from)
        .collect();
    folders.sort();
    folders
}

/// Locates a library, opens it, and keeps it open.
fn find(library: Library, around: &Surroundings<'_>) -> Result<LoadedLibrary, Missing> {
    let missing = |why: String| Missing { library, why };
    let files = library.files(around.driver);
    if let Some(named) = (around.variable)(library.variable()).filter(|n| !n.is_empty()) {
        let named = PathBuf::from(named);
        let file = if named.is_dir() {
            in_folder(files, &named)
        } else {
            Some(named.clone())
        };
        let file = file.ok_or_else(|| {
            missing(format!(
                ": {} is {}, which has no such file",
                library.variable(),
                named.display()
            ))
        })?;
        return match open(library, &file) {
            Ok(()) => Ok(LoadedLibrary {
                file,
                location: Location::Variable,
            }),
            Err(e) => Err(missing(format!(
                ": {} is {}, which cannot be opened: {e}",
                library.variable(),
                named.display()
            ))),
        };
    }
    for &name in files {
        if open_file(Path::new(name)).is_ok() {
            return Ok(LoadedLibrary {
                file: name.into(),
                location: Location::Loader,
            });
        }
    }
    let mut why = String::new();
    let toolkits = around
        .toolkits()
        .into_iter()
        .map(|folder| (folder, Location::Toolkit));
    for (folder, location) in
        toolkits.chain(around.wheels().map(|folder| (folder, Location::Wheel)))
    {
        // No wheel brings the driver.
        if library == Library::Driver && location == Location::Wheel {
            break;
        }
        let Some(file) = in_folder(files, &folder) else {
            continue;
        };
        match open(library, &file) {
            Ok(()) => return Ok(LoadedLibrary { file, location }),
            Err(e) => why = format!(": {} cannot be opened: {e}", file.display()),
        }
    }
    Err(missing(why))
}

/// The path of an open library: that of the file, or the one under which the loader found it by its
/// name, as far as the system tells.
pub(crate) fn path_of(file: &Path) -> Option<PathBuf> {
    if file.is_file() {
        return Some(file.to_path_buf());
    }
    let name = file.file_name()?.to_str()?;
    // The file's own name may have more numbers at its end than the name that links to it.
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let mut paths = maps
        .lines()
        .filter_map(|line| line.find('/').map(|at| &line[at..]));
    paths
        .find(|path| name_starts(Path::new(path), name))
        .map(PathBuf::from)
}

/// The first of these files that a folder has.
fn in_folder(files: &[&str], folder: &Path) -> Option<PathBuf> {
    files
        .iter()
        .map(|name| folder.join(name))
        .find(|file| file.is_file())
}

/// Opens a library after its companions from its own folder.
fn open(library: Library, file: &Path) -> Result<(), String> {
    let folder = file.parent().map(entries).unwrap_or_default();
    for companion in library.companions() {
        let beside = folder
            .iter()
            .filter(|p| name_starts(p, companion) && !p.to_string_lossy().contains(".alt."));
        for file in beside {
            // If a companion is missing, opening the library itself reports it.
            let _ = open_file(file);
        }
    }
    open_file(file)
}

/// Opens a file for the rest of the process.
fn open_file(file: &Path) -> Result<(), String> {
    // SAFETY: the initialisers of these libraries may run at any time, and the library is never
    // closed.
    let opened = unsafe { libloading::Library::new(file) };
    opened.map(std::mem::forget).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(file: &Path) {
        std::fs::create_dir_all(file.parent().expect("a folder")).expect("a writable folder");
        std::fs::write(file, b"no library").expect("a writable file");
    }

    fn around<'a>(
        variable: &'a dyn Fn(&str) -> Option<OsString>,
        python: &'a dyn Fn() -> Vec<PathBuf>,
    ) -> Surroundings<'a> {
        Surroundings {
            variable,
            python,
            roots: &[],
            driver: None,
        }
    }

    #[test]
    fn a_variable_overrides_all_other_locations() {
        let folder = tempfile::tempdir().expect("a folder");
        let empty = folder.path().join("empty");
        std::fs::create_dir(&empty).expect("a folder");
        let broken = folder.path().join("libnvrtc.so.13");
        touch(&broken);
        for (named, says) in [
            (&empty, "has no such file"),
            (&broken, "cannot be opened"),
            (&folder.path().to_path_buf(), "cannot be opened"),
        ] {
            let variable =
                |name: &str| (name == "SLABWISE_LIBNVRTC").then(|| named.clone().into_os_string());
            let never_run = || panic!("Python was asked");
            let missing =
                find(Library::Nvrtc, &around(&variable, &never_run)).expect_err("it is no library");
            assert!(
                missing.why.contains(says) && missing.why.contains("SLABWISE_LIBNVRTC"),
                "{missing}"
            );
            assert!(
                missing
                    .to_string()
                    .contains("pip install nvidia-cuda-nvrtc"),
                "{missing}"
            );
        }
    }

    #[test]
    fn wheels_are_searched_in_the_environment_then_in_python_packages() {
        let folder = tempfile::tempdir().expect("a folder");
        let [environment, other] = ["environment", "other"].map(|n| folder.path().join(n));
        let first = environment.join("lib/python3.12/site-packages/nvidia/cu13/lib");
        let second = other.join("nvidia/cublas/lib");
        touch(&first.join("libnvrtc.so.13"));
        touch(&second.join("libcublasLt.so.12"));
        let third = other.join("nvidia/cudnn/lib");
        touch(&third.join("libcudnn.so.9"));
        let variable =
            |name: &str| (name == "VIRTUAL_ENV").then(|| environment.clone().into_os_string());
        let python = || vec![other.clone()];
        let around = around(&variable, &python);
        assert_eq!(
            around.wheels().collect::<Vec<_>>(),
            [first.clone(), third.clone(), second.clone()]
        );
        assert_eq!(
            in_folder(Library::Cudnn.files(None), &third),
            Some(third.join("libcudnn.so.9"))
        );
        let missing = find(
            Library::Cudnn,
            &Surroundings {
                variable: &variable,
                python: &Vec::new,
                roots: &[],
                driver: None,
            },
        );
        assert!(
            missing
                .expect_err("it is in no environment")
                .to_string()
                .starts_with("cuDNN (libcudnn) was not found")
        );
        assert_eq!(
            in_folder(Library::Nvrtc.files(None), &first),
            Some(first.join("libnvrtc.so.13"))
        );
        assert_eq!(
            in_folder(Library::CublasLt.files(None), &second),
            Some(second.join("libcublasLt.so.12"))
        );
        assert_eq!(in_folder(Library::CublasLt.files(None), &first), None);
    }

    #[test]
    fn toolkits_named_by_a_variable_come_before_the_usual_folders() {
        let variable = |name: &str| (name == "CUDA_HOME").then(|| "/elsewhere".into());
        let around = Surroundings {
            variable: &variable,
            python: &Vec::new,
            roots: &["/usual"],
            driver: None,
        };
        let folders = around.toolkits();
        assert_eq!(folders[0], Path::new("/elsewhere/lib64"));
        assert!(folders.contains(&PathBuf::from("/usual/targets/x86_64-linux/lib")));
    }

    #[test]
    fn libraries_are_no_newer_than_the_driver() {
        for (library, name) in [
            (Library::CublasLt, "libcublasLt.so"),
            (Library::Nvrtc, "libnvrtc.so"),
        ] {
            let folder = tempfile::tempdir().expect("a folder");
            let [older, newer] =
                [12, 13].map(|major| folder.path().join(format!("{name}.{major}")));
            touch(&newer);
            let found = |driver| in_folder(library.files(driver), folder.path());
            assert_eq!((found(Some(12)), found(None)), (None, Some(newer.clone())));
            touch(&older);
            assert_eq!(found(Some(12)), Some(older));
            assert_eq!(found(Some(13)), Some(newer));
        }
    }
}
