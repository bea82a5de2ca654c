//! The on-disk cache of compiled functions and of kernel choices, so that a kernel is compiled once
//! and not at every start.
//!
//! The key of an [`entry`] is a hash of everything that its code depends on: source, options,
//! architecture, the compiler's version and its file. Code that may include other files has no entry
//! ([`crate::compiler`]). Because an entry holds code that will be
//! executed, the folder belongs to the user alone, and a folder that others can write to is refused.
//! Entries are written to a temporary file and renamed, contain a hash of themselves, and are rebuilt
//! if anything is wrong with them.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use sha2::{Digest, Sha256};

use crate::nvrtc::{Cubin, Program};

pub mod entry;

/// The size limit of the whole cache, bytes; the least recently used entries are evicted first.
const BYTES_MAX: u64 = 1 << 30;

/// The magic number of entries that hold a kernel choice.
const PICK: &entry::Magic = b"slabwise pick 02";

/// The size limit of such an entry, bytes: it holds a name or some numbers.
const PICK_BYTES_MAX: u64 = 4096;

/// A folder of compiled functions.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: PathBuf,
    bytes_max: u64,
}

/// Why the cache cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No variable says where the folder is.
    #[error(
        "there is no folder for compiled kernels: set SLABWISE_CACHE_DIR, XDG_CACHE_HOME or HOME"
    )]
    Nowhere,
    /// The folder cannot be created or read.
    #[error("the folder of compiled kernels {}: {source}; SLABWISE_CACHE_DIR names another", folder.display())]
    Folder {
        /// The folder.
        folder: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// Other users could put code there.
    #[error(
        "the folder of compiled kernels {} {why}: its contents would be executed, so it is not used; chmod 700 it, or name another in SLABWISE_CACHE_DIR",
        folder.display()
    )]
    NotPrivate {
        /// The folder.
        folder: PathBuf,
        /// The reason.
        why: String,
    },
}

impl Cache {
    /// The user's cache: `SLABWISE_CACHE_DIR`, or `slabwise` in `XDG_CACHE_HOME` or in `~/.cache`.
    ///
    /// # Errors
    /// If there is no such folder and none can be made, or others can write to it.
    pub fn of_user() -> Result<Cache, Error> {
        let variable = |name| {
            std::env::var_os(name)
                .filter(|v| !v.is_empty())
                .map(PathBuf::from)
        };
        let folder = variable("SLABWISE_CACHE_DIR")
            .or_else(|| variable("XDG_CACHE_HOME").map(|d| d.join("slabwise")))
            .or_else(|| variable("HOME").map(|d| d.join(".cache/slabwise")));
        Cache::at(folder.ok_or(Error::Nowhere)?)
    }

    /// The cache in this folder, which is created if it does not exist.
    ///
    /// # Errors
    /// See [`Cache::of_user`].
    pub fn at(folder: impl Into<PathBuf>) -> Result<Cache, Error> {
        let folder = folder.into();
        private(&folder)?;
        Ok(Cache {
            folder,
            bytes_max: BYTES_MAX,
        })
    }

    /// The same cache with another size limit, bytes.
    #[must_use]
    pub fn with_bytes_max(mut self, bytes: u64) -> Cache {
        self.bytes_max = bytes;
        self
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The code stored under this key, if there is an intact entry.
    pub(crate) fn cubin(&self, key: &str) -> Option<Cubin> {
        let file = self.cubin_file(key);
        let read = entry::read(&file, key, self.entry_bytes_max());
        let cubin = read.unwrap_or_else(|why| {
            log::warn!("{} is compiled again: {why}", file.display());
            None
        })?;
        mark_used(&file);
        Some(cubin)
    }

    /// Stores code under a key, if possible. [`Cache::trim`] is called after all new entries.
    pub(crate) fn store_cubin(&self, key: &str, cubin: &Cubin) {
        let (file, bytes, bytes_max) = (
            self.cubin_file(key),
            entry::encode(cubin, key),
            self.entry_bytes_max(),
        );
        if bytes.len() as u64 > bytes_max {
            log::warn!(
                "{} is not stored: it would have {} bytes, and an entry has at most {bytes_max}",
                file.display(),
                bytes.len()
            );
        } else if let Err(e) = self.store(&file, &bytes) {
            log::warn!("{} cannot be stored: {e}", file.display());
        }
    }

    fn cubin_file(&self, key: &str) -> PathBuf {
        self.folder.join(format!("{key}.cubin"))
    }

    fn entry_bytes_max(&self) -> u64 {
        self.bytes_max.min(entry::BYTES_MAX)
    }

    /// The kernel choice stored under this key, if there is an intact entry.
    pub(crate) fn pick(&self, key: &str) -> Option<Vec<u8>> {
        let file = self.pick_file(key);
        let read = entry::bytes(&file, PICK_BYTES_MAX).and_then(|bytes| {
            let rest = bytes
                .as_deref()
                .map(|bytes| entry::open(PICK, bytes, key))
                .transpose()?;
            Ok(rest.map(<[u8]>::to_vec))
        });
        let rest = read.unwrap_or_else(|why| {
            log::warn!("the kernel choice in {} is not used: {why}", file.display());
            None
        })?;
        mark_used(&file);
        Some(rest)
    }

    /// Stores a kernel choice under a key, if possible, unless there is an intact entry that
    /// `stays`: then returns that one. Of processes that store one at once, all but the first get
    /// the choice of the first.
    pub(crate) fn store_pick(
        &self,
        key: &str,
        rest: &[u8],
        stays: impl Fn(&[u8]) -> bool,
    ) -> Option<Vec<u8>> {
        let (file, bytes) = (self.pick_file(key), entry::seal_as(PICK, rest, key));
        let stored = match self.store_first(&file, &bytes) {
            Ok(()) => Ok(()),
            Err(_) => match self.pick(key).filter(|there| stays(there)) {
                Some(there) => return Some(there),
                // Nothing that stays, or a file system without links.
                None => self.store(&file, &bytes),
            },
        };
        match stored {
            Ok(()) => self.trim(),
            Err(e) => log::warn!("{} cannot be stored: {e}", file.display()),
        }
        None
    }

    fn pick_file(&self, key: &str) -> PathBuf {
        self.folder.join(format!("{key}.pick"))
    }

    /// Writes an entry to a temporary file and renames it, so that no process reads half of one.
    fn store(&self, file: &Path, bytes: &[u8]) -> io::Result<()> {
        self.written(bytes, |beside| fs::rename(beside, file))
    }

    /// Stores an entry as [`Cache::store`], unless the file exists, which is an error.
    fn store_first(&self, file: &Path, bytes: &[u8]) -> io::Result<()> {
        self.written(bytes, |beside| {
            fs::hard_link(beside, file).map(|()| drop(fs::remove_file(beside)))
        })
    }

    /// Writes a temporary file and lets `publish` make it an entry.
    fn written(
        &self,
        bytes: &[u8],
        publish: impl FnOnce(&Path) -> io::Result<()>,
    ) -> io::Result<()> {
        let beside = unused(&self.folder);
        let written = fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&beside)
            .and_then(|mut f| f.write_all(bytes));
        let published = written.and_then(|()| publish(&beside));
        if published.is_err() {
            let _ = fs::remove_file(&beside);
        }
        published
    }

    /// Evicts the least recently used entries beyond the limit, and removes what processes that
    /// were killed left of entries. Because it reads the whole folder, it is called once for all
    /// entries that a program has added.
    pub(crate) fn trim(&self) {
        let mut entries: Vec<(SystemTime, u64, PathBuf)> = Vec::new();
        for entry in fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            let (path, Ok(meta)) = (entry.path(), entry.metadata()) else {
                continue;
            };
            if path
                .extension()
                .is_some_and(|e| e == "cubin" || e == "pick")
            {
                entries.push((
                    meta.modified().unwrap_or(SystemTime::UNIX_EPOCH),
                    meta.len(),
                    path,
                ));
            } else if is_left_over(&path, &meta) {
                let _ = fs::remove_file(&path);
            }
        }
        entries.sort();
        let mut total: u64 = entries.iter().map(|(_, bytes, _)| bytes).sum();
        for (_, bytes, path) in entries {
            if total <= self.bytes_max {
                break;
            }
            // Another process may have removed it first.
            let _ = fs::remove_file(&path);
            total -= bytes;
        }
    }
}

/// Notes the time of an entry's last use, which decides which entries are evicted.
fn mark_used(file: &Path) {
    let _ = fs::File::options()
        .append(true)
        .open(file)
        .and_then(|f| f.set_modified(SystemTime::now()));
}

/// Creates the folder for its user alone, or checks its permissions.
#[cfg(unix)]
fn private(folder: &Path) -> Result<(), Error> {
    use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
    let fail = |source| Error::Folder {
        folder: folder.into(),
        source,
    };
    if let Some(above) = folder.parent() {
        fs::create_dir_all(above).map_err(fail)?;
    }
    match fs::DirBuilder::new().mode(0o700).create(folder) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(fail(e)),
        _ => {}
    }
    let meta = fs::metadata(folder).map_err(fail)?;
    if !meta.is_dir() {
        return Err(fail(io::Error::from(io::ErrorKind::NotADirectory)));
    }
    let not = |why: String| {
        Err(Error::NotPrivate {
            folder: folder.into(),
            why,
        })
    };
    // The owner of a new file is the user that the process acts for.
    let probe = unused(folder);
    let own = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(&probe)
        .and_then(|f| f.metadata())
        .map_err(fail)?
        .uid();
    let _ = fs::remove_file(&probe);
    if meta.uid() != own {
        return not(format!("belongs to user {}, not to user {own}", meta.uid()));
    }
    let mode = meta.permissions().mode() & 0o777;
    if mode & 0o022 != 0 {
        return not(format!("can be written to by others (mode {mode:o})"));
    }
    Ok(())
}

/// Creates the folder; on systems other than Unix its location determines the permissions.
#[cfg(not(unix))]
fn private(folder: &Path) -> Result<(), Error> {
    fs::create_dir_all(folder).map_err(|source| Error::Folder {
        folder: folder.into(),
        source,
    })
}

/// The beginning of the names of files that become entries.
const WRITING: &str = "writing-";

/// Whether a file was to become an entry long ago.
fn is_left_over(path: &Path, meta: &fs::Metadata) -> bool {
    const LONG: Duration = Duration::from_secs(60 * 60);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let age = meta.modified().ok().and_then(|at| at.elapsed().ok());
    name.starts_with(WRITING) && age.is_some_and(|age| age > LONG)
}

/// A file name in the folder that no other thread or process uses.
fn unused(folder: &Path) -> PathBuf {
    static COUNT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let since_epoch = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |d| d.as_nanos());
    let count = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    folder.join(format!(
        "{WRITING}{}-{count}-{since_epoch}",
        std::process::id()
    ))
}

/// The key of a program: a hash of everything that its code depends on. `build` identifies the
/// compiler's build, since several have the same version.
pub(crate) fn key(
    program: &Program,
    (major, minor): (u32, u32),
    build: &str,
    options: &[&str],
) -> String {
    hash(&[
        &format!("NVRTC {major}.{minor} {build} sm_{}", program.sm),
        &options.join(" "),
        program.prelude,
        &program.source,
    ])
}

/// A hash of texts, as 64 hexadecimal digits.
pub(crate) fn hash(parts: &[&str]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    hash.finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A cache, the file of one key in it, and a count of how often its content was built.
    struct Kept {
        cache: Cache,
        file: PathBuf,
        made: usize,
        _folder: tempfile::TempDir,
    }

    impl Kept {
        const KEY: &str = "a key";

        fn new() -> Kept {
            let folder = tempfile::tempdir().expect("a folder");
            let cache = Cache::at(folder.path().join("cache"))
                .expect("a private folder")
                .with_bytes_max(1000);
            let file = cache.folder().join(format!("{}.cubin", Kept::KEY));
            Kept {
                cache,
                file,
                made: 0,
                _folder: folder,
            }
        }

        fn get(&mut self, image_bytes: usize) -> usize {
            let cubin = Cubin {
                image: vec![7; image_bytes],
                usage: Vec::new(),
            };
            match self.cache.cubin(Kept::KEY) {
                Some(kept) => assert_eq!(kept, cubin),
                None => {
                    self.made += 1;
                    self.cache.store_cubin(Kept::KEY, &cubin);
                }
            }
            self.made
        }
    }

    #[test]
    fn many_threads_can_open_one_folder_at_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let cache = folder.path().join("cache");
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        Cache::at(&cache).expect("a private folder");
                    }
                });
            }
        });
        assert_eq!(
            fs::read_dir(&cache).expect("own folder").count(),
            0,
            "nothing is left behind"
        );
    }

    #[test]
    fn damaged_cut_huge_or_foreign_entries_are_rebuilt() {
        let mut kept = Kept::new();
        assert_eq!((kept.get(100), kept.get(100)), (1, 1));
        let whole = fs::read(&kept.file).expect("an entry");
        let foreign = entry::encode(
            &Cubin {
                image: vec![8],
                usage: Vec::new(),
            },
            "another key",
        );
        let mut damaged = whole.clone();
        damaged[150] ^= 1;
        for (count, bytes) in [&whole[..60], &damaged, &foreign, b"", &[0; 4000]]
            .into_iter()
            .enumerate()
        {
            fs::write(&kept.file, bytes).expect("own folder");
            assert_eq!(
                (kept.get(100), kept.get(100)),
                (count + 2, count + 2),
                "then it is kept again"
            );
            assert_eq!(fs::read(&kept.file).expect("an entry"), whole);
        }
        // More than fits in memory: the length is checked before anything is read.
        fs::File::options()
            .write(true)
            .open(&kept.file)
            .and_then(|f| f.set_len(1 << 43))
            .expect("a file with a hole");
        assert!(
            matches!(entry::read(&kept.file, Kept::KEY, 1000), Err(entry::Refused::TooLarge { bytes, .. }) if bytes == 1 << 43)
        );
        assert_eq!((kept.get(100), kept.get(100)), (7, 7));
    }

    #[test]
    fn entries_that_cannot_be_stored_are_rebuilt_each_time() {
        let mut kept = Kept::new();
        assert_eq!((kept.get(2000), kept.get(2000)), (1, 2));
        assert!(!kept.file.exists(), "larger than an entry may be");
        fs::create_dir(&kept.file).expect("own folder");
        assert!(matches!(
            entry::read(&kept.file, Kept::KEY, 1000),
            Err(entry::Refused::NotAFile)
        ));
        assert_eq!((kept.get(100), kept.get(100)), (3, 4));
        assert_eq!(
            fs::read_dir(kept.cache.folder()).expect("a folder").count(),
            1,
            "nothing half written stays"
        );
    }

    #[test]
    fn a_key_follows_everything_that_code_depends_on() {
        let program = |prelude, source: &str, sm| Program {
            names: String::new(),
            prelude,
            source: source.into(),
            sm,
        };
        let key_with = |prelude, source, sm, minor, options: &[&str]| {
            key(&program(prelude, source, sm), (13, minor), "", options)
        };
        let key = |source, sm, minor, options: &[&str]| key_with("", source, sm, minor, options);
        let options = crate::nvrtc::options((13, 0));
        let base = key("x", 90, 0, &options);
        assert_eq!(base.len(), 64);
        assert_eq!(base, key("x", 90, 0, &options));
        for other in [
            key("y", 90, 0, &options),
            key_with("y", "x", 90, 0, &options),
            key("x", 80, 0, &options),
            key("x", 90, 1, &options),
            key("x", 90, 0, &options[1..]),
            super::key(&program("", "x", 90), (13, 0), "another", &options),
        ] {
            assert_ne!(base, other);
        }
    }

    #[test]
    fn the_least_recently_used_go_first() {
        let folder = tempfile::tempdir().expect("a folder");
        let cache = Cache::at(folder.path().join("cache"))
            .expect("a private folder")
            .with_bytes_max(250);
        let file = |name: &str| cache.folder().join(format!("{name}.cubin"));
        for (name, age) in [("old", 30), ("older", 60), ("new", 0)] {
            cache.store(&file(name), &[0; 100]).expect("it is written");
            let past = SystemTime::now() - Duration::from_secs(age);
            if file(name).exists() {
                fs::File::options()
                    .append(true)
                    .open(file(name))
                    .and_then(|f| f.set_modified(past))
                    .expect("a time");
            }
            cache.trim();
        }
        assert!(file("new").exists() && file("old").exists() && !file("older").exists());
        let left = fs::read_dir(cache.folder()).expect("a folder").count();
        assert_eq!(left, 2, "nothing half written stays");
    }

    #[test]
    fn choices_in_use_are_not_evicted_before_unused_code() {
        let folder = tempfile::tempdir().expect("a folder");
        let cache = Cache::at(folder.path().join("cache")).expect("a private folder");
        let [used, unused] = ["used", "unused"].map(|name| hash(&[name]));
        let cubin = Cubin {
            image: vec![7; 1000],
            usage: Vec::new(),
        };
        cache.store_pick(&used, b"own gemm", |_| true);
        cache.store_cubin(&unused, &cubin);
        for (file, age) in [
            (cache.pick_file(&used), 60),
            (cache.cubin_file(&unused), 30),
        ] {
            fs::File::options()
                .append(true)
                .open(file)
                .and_then(|f| f.set_modified(SystemTime::now() - Duration::from_secs(age)))
                .expect("a time");
        }
        assert_eq!(cache.pick(&used).as_deref(), Some(&b"own gemm"[..]));
        let cache = cache.with_bytes_max(500);
        cache.trim();
        assert!(cache.pick_file(&used).exists() && !cache.cubin_file(&unused).exists());
    }

    #[test]
    fn files_that_did_not_become_entries_are_removed_later() {
        let folder = tempfile::tempdir().expect("a folder");
        let cache = Cache::at(folder.path().join("cache")).expect("a private folder");
        let files =
            ["writing-1-0-1", "writing-2-0-2", "other"].map(|name| cache.folder().join(name));
        for (file, age) in files.iter().zip([7200, 60, 7200]) {
            let past = SystemTime::now() - Duration::from_secs(age);
            fs::File::create(file)
                .and_then(|f| f.set_modified(past))
                .expect("own folder");
        }
        cache.trim();
        assert_eq!(files.map(|file| file.exists()), [false, true, true]);
    }

    #[cfg(unix)]
    #[test]
    fn a_folder_that_others_can_write_to_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().expect("a folder");
        let made = folder.path().join("made");
        Cache::at(&made).expect("it is made");
        assert_eq!(
            fs::metadata(&made).expect("a folder").permissions().mode() & 0o777,
            0o700
        );
        for (mode, refused) in [
            (0o777, true),
            (0o770, true),
            (0o702, true),
            (0o755, false),
            (0o700, false),
        ] {
            fs::set_permissions(&made, fs::Permissions::from_mode(mode)).expect("own folder");
            let opened = Cache::at(&made);
            assert_eq!(opened.is_err(), refused, "{mode:o}");
            if let Err(e) = opened {
                assert!(e.to_string().contains("SLABWISE_CACHE_DIR"), "{e}");
            }
        }
    }
}
