//! Files that are written as a whole or not at all, and gzip data that is read as a whole or
//! rejected.

use flate2::Compression;
use flate2::bufread::GzDecoder;
use flate2::write::GzEncoder;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, BufRead, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

/// The most links followed from one name: the limit of Linux.
const LINKS_MAX: usize = 40;

/// Makes `bytes` the content of `path`. At any moment, a regular file has either its earlier
/// content or all of the new one: the bytes go to a temporary file in the same folder, which is
/// synced and then renamed. The permissions of an existing file are kept, and so is its owner as
/// far as the system permits it; a new file has the permissions that the umask leaves. A link is
/// followed, even to a file that does not exist yet. A pipe, a terminal or `/dev/stdout`, which are
/// not regular files but take bytes, is written into. Further hard links, access lists and extended
/// attributes stay with the earlier content.
///
/// A process killed before the rename leaves a file named `.slabwise-*.tmp`.
///
/// # Errors
/// The system's error, such as a full disk; an error for a folder, a block device, or a file that
/// may not be written to. A regular file at `path` is then unchanged.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace_with(path, &mut |file| file.write_all(bytes))
}

/// Like [`replace`], with content that `write` produces piece by piece, so that it need not be in
/// memory at once. If `write` fails, a regular file at `path` is unchanged.
///
/// # Errors
/// Those of [`replace`], and those of `write`.
pub fn replace_with(
    path: &Path,
    write: &mut dyn FnMut(&mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    let target = followed(path)?;
    let folder = match target.parent() {
        Some(folder) if folder.as_os_str().is_empty() => Path::new("."),
        Some(folder) => folder,
        None => return Err(io::Error::new(ErrorKind::IsADirectory, "it is a folder")),
    };
    // The entries of a process's descriptor folder name open files, which are written in place.
    if fs::canonicalize(folder).is_ok_and(|folder| folder.starts_with("/proc")) {
        return write(&mut OpenOptions::new().append(true).open(&target)?);
    }
    let before = match fs::metadata(&target) {
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        found => Some(found?),
    };
    match &before {
        Some(there) if there.is_dir() => {
            return Err(io::Error::new(ErrorKind::IsADirectory, "it is a folder"));
        }
        Some(there) if is_block_device(there) => {
            return Err(io::Error::new(
                ErrorKind::InvalidInput,
                "it is a block device, whose content is not overwritten",
            ));
        }
        Some(there) if !there.is_file() => {
            return write(&mut OpenOptions::new().write(true).open(&target)?);
        }
        // A file that may not be written to may not be replaced either.
        Some(_) => drop(OpenOptions::new().write(true).open(&target)?),
        None => {}
    }
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        // The umask takes from the rights of a new file; a file that exists may hold what other
        // users must not read, and its rights are copied below.
        options.mode(if before.is_none() { 0o666 } else { 0o600 });
    }
    // Opened and written to without tempfile's wrappers, whose errors name the temporary file.
    let mut file = tempfile::Builder::new()
        .prefix(".slabwise-")
        .suffix(".tmp")
        .make_in(folder, |path| options.open(path))
        .map_err(|error| match error.kind() {
            ErrorKind::NotFound => {
                let missing = format!("there is no folder {}", folder.display());
                io::Error::new(ErrorKind::NotFound, missing)
            }
            _ => error,
        })?;
    write(file.as_file_mut())?;
    if let Some(before) = &before {
        keep_access(file.as_file(), before)?;
    }
    file.as_file().sync_all()?;
    file.persist(&target).map_err(|error| error.error)?;
    // Makes the rename itself durable. Not every system can open a folder, and the file is complete
    // either way.
    if let Ok(folder) = File::open(folder) {
        let _ = folder.sync_all();
    }
    Ok(())
}

/// A text as the content of a file of this name: gzipped if the name ends in `.gz`.
///
/// # Errors
/// None in practice, because it writes to memory.
pub fn packed_for(path: &Path, text: &str) -> io::Result<Vec<u8>> {
    if path
        .extension()
        .is_none_or(|extension| !extension.eq_ignore_ascii_case("gz"))
    {
        return Ok(text.into());
    }
    let mut packer = GzEncoder::new(Vec::new(), Compression::default());
    packer.write_all(text.as_bytes())?;
    packer.finish()
}

/// A reader that unpacks gzip data: one or several members, with no bytes after the last.
#[derive(Debug)]
pub struct Gunzip<R> {
    /// `None` at the end of the data.
    member: Option<GzDecoder<R>>,
}

impl<R: BufRead> Gunzip<R> {
    /// Unpacks these bytes. An error, such as for other bytes after the last member, is returned at
    /// the place where it occurs.
    pub fn new(packed: R) -> Self {
        Gunzip {
            member: Some(GzDecoder::new(packed)),
        }
    }
}

impl<R: BufRead> Read for Gunzip<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while let Some(member) = &mut self.member {
            let length = member.read(into)?;
            if length > 0 || into.is_empty() {
                return Ok(length);
            }
            let Some(mut rest) = self.member.take().map(GzDecoder::into_inner) else {
                break;
            };
            match rest.fill_buf()?.first() {
                None => break,
                Some(0x1f) => self.member = Some(GzDecoder::new(rest)),
                Some(_) => {
                    return Err(io::Error::new(
                        ErrorKind::InvalidData,
                        "other bytes follow where it ends",
                    ));
                }
            }
        }
        Ok(0)
    }
}

/// The target of a path, links followed one by one, because the last may lead to a missing file.
/// Links in a process's descriptor folder lead to no name and are not followed.
fn followed(path: &Path) -> io::Result<PathBuf> {
    let mut at = path.to_owned();
    for _ in 0..LINKS_MAX {
        if !fs::symlink_metadata(&at).is_ok_and(|there| there.is_symlink()) {
            return Ok(at);
        }
        let folder = at.parent().unwrap_or(Path::new(""));
        if folder.starts_with("/proc")
            || fs::canonicalize(folder).is_ok_and(|folder| folder.starts_with("/proc"))
        {
            return Ok(at);
        }
        at = folder.join(fs::read_link(&at)?);
    }
    Err(io::Error::new(
        ErrorKind::InvalidInput,
        format!("more than {LINKS_MAX} links lead from one to the other"),
    ))
}

#[cfg(unix)]
fn is_block_device(there: &Metadata) -> bool {
    use std::os::unix::fs::FileTypeExt;
    there.file_type().is_block_device()
}

#[cfg(not(unix))]
fn is_block_device(_: &Metadata) -> bool {
    false
}

/// Gives a file the owner, group and permissions of another, and no user more rights than before:
/// if the group cannot be kept, the group's permissions become those of all others.
#[cfg(unix)]
fn keep_access(file: &File, before: &Metadata) -> io::Result<()> {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
    let is_of = |now: &Metadata| (now.uid() == before.uid(), now.gid() == before.gid());
    if is_of(&file.metadata()?) != (true, true) {
        // Only a superuser can change the owner; a group of the user can be kept without.
        let _ = fchown(file, Some(before.uid()), Some(before.gid()))
            .or_else(|_| fchown(file, None, Some(before.gid())));
    }
    let (same_owner, same_group) = is_of(&file.metadata()?);
    let mut mode = before.mode() & 0o7777;
    if !same_group {
        mode = mode & !0o2070 | (mode & 0o7) << 3;
    }
    if !same_owner {
        mode &= !0o4000;
    }
    file.set_permissions(fs::Permissions::from_mode(mode))
}

#[cfg(not(unix))]
fn keep_access(file: &File, before: &Metadata) -> io::Result<()> {
    file.set_permissions(before.permissions())
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
    use std::process::Command;

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir().expect("a folder")
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).expect("a folder");
        let mut names: Vec<String> = entries
            .map(|entry| {
                entry
                    .expect("an entry")
                    .file_name()
                    .to_string_lossy()
                    .into_owned()
            })
            .collect();
        names.sort();
        names
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).expect("it is there").mode() & 0o7777
    }

    #[test]
    fn new_files_follow_the_umask_and_existing_ones_keep_their_mode() {
        let folder = folder();
        let [new, plain, old] = ["new", "plain", "old"].map(|name| folder.path().join(name));
        replace(&new, b"1").expect("it is written");
        File::create(&plain).expect("it is made");
        assert_eq!(mode(&new), mode(&plain), "as any program's files");
        for kept in [0o600, 0o640, 0o604, 0o755] {
            fs::write(&old, "before").expect("it is written");
            fs::set_permissions(&old, fs::Permissions::from_mode(kept)).expect("it is mine");
            let inode = fs::metadata(&old).expect("it is there").ino();
            replace(&old, b"after").expect("it is written");
            assert_eq!(
                (mode(&old), fs::read(&old).expect("it is there")),
                (kept, b"after".to_vec())
            );
            assert_ne!(
                fs::metadata(&old).expect("it is there").ino(),
                inode,
                "replaced, not overwritten"
            );
        }
        assert_eq!(names(folder.path()), ["new", "old", "plain"]);
    }

    #[test]
    fn owners_are_kept_if_permitted() {
        let folder = folder();
        let path = folder.path().join("a");
        fs::write(&path, "before").expect("it is written");
        // Only a superuser can try it.
        if std::os::unix::fs::chown(&path, Some(12_345), Some(54_321)).is_err() {
            return;
        }
        replace(&path, b"after").expect("it is written");
        let there = fs::metadata(&path).expect("it is there");
        assert_eq!((there.uid(), there.gid()), (12_345, 54_321));
    }

    /// Messages name the caller's path, and the temporary file means nothing to their reader.
    #[test]
    fn errors_do_not_name_the_temporary_file() {
        let folder = folder();
        let at = |name: &str| folder.path().join(name);
        let error = replace(&at("missing/a"), b"1").expect_err("no folder");
        assert_eq!(error.kind(), ErrorKind::NotFound);
        let missing = at("missing").display().to_string();
        assert_eq!(error.to_string(), format!("there is no folder {missing}"));
        fs::write(at("file"), "before").expect("it is written");
        let error = replace(&at("file/a"), b"1").expect_err("a file is no folder");
        assert!(!error.to_string().contains("slabwise-"), "{error}");
        let error = replace(&at(&"x".repeat(300)), b"1").expect_err("too long a name");
        assert!(!error.to_string().contains("slabwise-"), "{error}");
        let mut full = |file: &mut dyn Write| {
            file.write_all(b"1")?;
            Err(io::Error::from_raw_os_error(28))
        };
        let error = replace_with(&at("file"), &mut full).expect_err("a full disk");
        assert_eq!(error.raw_os_error(), Some(28));
        assert_eq!(fs::read(at("file")).expect("it is there"), b"before");
        assert_eq!(names(folder.path()), ["file"]);
    }

    #[test]
    fn links_are_followed_to_existing_and_missing_files() {
        let folder = folder();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("inner")).expect("it is made");
        fs::write(at("inner/there"), "before").expect("it is written");
        for (link, to) in [
            ("one", "two"),
            ("two", "inner/there"),
            ("three", "inner/not_yet"),
            ("inner/up", "../above"),
        ] {
            symlink(to, at(link)).expect("it is made");
        }
        for (link, file) in [
            ("one", "inner/there"),
            ("three", "inner/not_yet"),
            ("inner/up", "above"),
        ] {
            replace(&at(link), link.as_bytes()).expect("it is written");
            assert!(
                fs::symlink_metadata(at(link))
                    .expect("it is there")
                    .is_symlink()
            );
            assert_eq!(fs::read(at(file)).expect("it is there"), link.as_bytes());
        }
        symlink("round", at("round")).expect("it is made");
        assert!(replace(&at("round"), b"1").is_err_and(|e| e.to_string().contains("links")));
    }

    #[test]
    fn pipes_and_descriptors_are_written_into() {
        let folder = folder();
        let path = folder.path().join("pipe");
        assert!(
            Command::new("mkfifo")
                .arg(&path)
                .status()
                .expect("it is there")
                .success()
        );
        let reader = std::thread::spawn({
            let path = path.clone();
            move || fs::read(path).expect("it is read")
        });
        replace(&path, b"through the pipe").expect("it is written");
        assert_eq!(reader.join().expect("it ends"), b"through the pipe");
        assert!(!fs::metadata(&path).expect("it is there").is_file());
        // A file that is open through a descriptor is appended to, not replaced.
        let (open, path) = (folder.path().join("open"), folder.path().join("link"));
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&open)
            .expect("it is made");
        file.write_all(b"first, ").expect("it is written");
        symlink(
            format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file)),
            &path,
        )
        .expect("it is made");
        replace(&path, b"second").expect("it is written");
        let mut text = String::new();
        file.read_to_string(&mut text).expect("it is read");
        assert_eq!(text, "second");
        assert_eq!(fs::read(&open).expect("it is there"), b"first, second");
        assert_eq!(names(folder.path()), ["link", "open", "pipe"]);
    }

    #[test]
    fn files_that_cannot_be_replaced_are_unchanged() {
        let folder = folder();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("inner")).expect("it is made");
        fs::write(at("file"), "before").expect("it is written");
        for (path, says) in [
            (at("inner"), "folder"),
            ("/".into(), "folder"),
            (at("none/file"), ""),
            (at("file/file"), ""),
        ] {
            let error = replace(&path, b"after")
                .expect_err("it cannot be")
                .to_string();
            assert!(error.contains(says), "{error}");
        }
        assert_eq!(names(folder.path()), ["file", "inner"]);
        // A file of another's cannot be told from one's own by a superuser.
        fs::set_permissions(at("file"), fs::Permissions::from_mode(0o400)).expect("it is mine");
        if File::options().write(true).open(at("file")).is_err() {
            assert!(
                replace(&at("file"), b"after")
                    .is_err_and(|e| e.kind() == ErrorKind::PermissionDenied)
            );
        }
        assert!(mode(&at("file")) == 0o400 && names(folder.path()) == ["file", "inner"]);
    }

    #[test]
    fn several_members_are_one_text_and_nothing_else_may_follow() {
        let unpacked = |bytes: &[u8]| io::read_to_string(Gunzip::new(bytes));
        let [one, two] =
            ["one, ", "two"].map(|text| packed_for(Path::new("a.gz"), text).expect("in memory"));
        let both = [&one[..], &two].concat();
        assert_eq!(unpacked(&both).expect("whole"), "one, two");
        for rest in [&b"\0"[..], b"junk", b"id,lower,upper,size"] {
            let error = unpacked(&[&both[..], rest].concat())
                .expect_err("something follows")
                .to_string();
            assert!(error.contains("other bytes follow"), "{error}");
        }
        for length in 1..both.len() {
            assert!(
                length == one.len() || unpacked(&both[..length]).is_err(),
                "cut to {length} bytes"
            );
        }
    }

    #[test]
    fn texts_are_packed_by_name() {
        assert_eq!(
            packed_for(Path::new("a.csv"), "text").expect("in memory"),
            b"text"
        );
        let packed = packed_for(Path::new("a.csv.GZ"), "text").expect("in memory");
        assert_eq!(
            io::read_to_string(flate2::read::GzDecoder::new(&packed[..])).expect("whole"),
            "text"
        );
    }
}
