//! Memory that processes of one machine share: files without a name, which their owner may write
//! and others map for reading.
//!
//! Such a file lives as long as a process has it open or mapped, so that it is freed however the
//! processes end. Its pages are committed at once by `fallocate` and it can never shrink, so that
//! no later access to it faults.

use std::fs::File;
use std::io::{Error, Result};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::MetadataExt;
use std::ptr::NonNull;

/// A mapping of a file.
struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is memory, which any thread may reach; its users synchronize accesses.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn of(file: &File, len: usize, protection: libc::c_int) -> Result<Mapping> {
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        // SAFETY: a new mapping of a file that is at least as long; it overlaps nothing.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                protection,
                flags,
                file.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or_else(Error::last_os_error)?;
        Ok(Mapping { start, len })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: it was mapped with this length, and nothing refers to it any more.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Memory of this process that others can map.
pub(super) struct Segment {
    mapping: Mapping,
    file: File,
    inode: u64,
}

impl Segment {
    /// A segment of zeros. The system must have the memory: Linux would end processes before it
    /// refused. More than the machine has is an error.
    pub fn new(len: usize) -> Result<Segment> {
        if len as u64 > installed() {
            return Err(Error::from_raw_os_error(libc::ENOMEM));
        }
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // SAFETY: the name is a C string.
        let file = unsafe { libc::memfd_create(c"slabwise".as_ptr(), flags) };
        if file < 0 {
            return Err(Error::last_os_error());
        }
        // SAFETY: a new descriptor, which nothing else owns.
        let file = unsafe { File::from_raw_fd(file) };
        let size = libc::off_t::try_from(len).map_err(Error::other)?;
        // SAFETY: these calls take a descriptor that is open, and numbers.
        unsafe {
            let given = libc::fallocate(file.as_raw_fd(), 0, 0, size);
            let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
            if given != 0 || libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) != 0 {
                return Err(Error::last_os_error());
            }
        }
        let mapping = Mapping::of(&file, len, libc::PROT_READ | libc::PROT_WRITE)?;
        let inode = file.metadata()?.ino();
        Ok(Segment {
            mapping,
            file,
            inode,
        })
    }

    pub fn start(&self) -> NonNull<u8> {
        self.mapping.start
    }

    pub fn len(&self) -> usize {
        self.mapping.len
    }

    /// The name under which other processes open it.
    pub fn address(&self) -> Address {
        Address {
            descriptor: self.file.as_raw_fd() as u64,
            inode: self.inode,
            len: self.mapping.len as u64,
        }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        let hole = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let len = self.mapping.len as libc::off_t;
        // SAFETY: the descriptor is open. The memory goes back to the system at once, though
        // others still have it mapped; they would read zeros.
        unsafe { libc::fallocate(self.file.as_raw_fd(), hole, 0, len) };
    }
}

/// Where another process finds a segment of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Address {
    pub descriptor: u64,
    /// The number of the file, by which another one under that descriptor is noticed.
    pub inode: u64,
    pub len: u64,
}

/// A segment of another process, mapped for reading.
pub(super) struct View(Mapping);

impl View {
    /// Maps a segment of the process of this number.
    pub fn open(process: u32, address: Address) -> Result<View> {
        let path = format!("/proc/{process}/fd/{}", address.descriptor);
        let file = File::open(path)?;
        let found = file.metadata()?;
        if (found.ino(), found.len()) != (address.inode, address.len) {
            return Err(Error::other("it is another file"));
        }
        let len = usize::try_from(address.len).map_err(Error::other)?;
        Mapping::of(&file, len, libc::PROT_READ).map(View)
    }

    pub fn start(&self) -> NonNull<u8> {
        self.0.start
    }

    pub fn len(&self) -> usize {
        self.0.len
    }
}

/// The bytes of the machine's memory.
fn installed() -> u64 {
    // SAFETY: zeros are a valid value, which the call overwrites.
    let information = unsafe {
        let mut information: libc::sysinfo = std::mem::zeroed();
        libc::sysinfo(&mut information);
        information
    };
    information.totalram * u64::from(information.mem_unit)
}

/// The identity of the running system and of its numbering of processes; ranks with equal ones may
/// open each other's segments. `None` where the system does not tell.
pub(super) fn machine() -> Option<[u8; MACHINE]> {
    let numbering = std::fs::metadata("/proc/self/ns/pid").ok()?.ino();
    let mut bytes = [0; MACHINE];
    bytes[..BOOT].copy_from_slice(&boot()?);
    bytes[BOOT..].copy_from_slice(&numbering.to_le_bytes());
    Some(bytes)
}

/// The bytes of [`machine`].
pub(super) const MACHINE: usize = BOOT + 8;

/// The identity of the running system, which it draws when it starts. `None` where it does not tell.
pub(crate) fn boot() -> Option<[u8; BOOT]> {
    let boot = std::fs::read("/proc/sys/kernel/random/boot_id").ok()?;
    boot.get(..BOOT)?.try_into().ok()
}

/// The bytes of [`boot`].
pub(crate) const BOOT: usize = 36;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_view_reads_what_the_owner_writes_until_it_is_dropped() {
        let own = Segment::new(10_000).expect("a segment");
        let view = View::open(std::process::id(), own.address()).expect("a view");
        assert_eq!((own.len(), view.len()), (10_000, 10_000));
        // SAFETY: both are mapped with 10,000 bytes, and this thread alone uses them.
        unsafe {
            own.start().add(9_999).write(7);
            assert_eq!(view.start().add(9_999).read(), 7);
        }
        drop(own);
        // SAFETY: the view is still mapped.
        assert_eq!(unsafe { view.start().add(9_999).read() }, 0);
    }

    #[test]
    fn views_cannot_be_written() {
        let own = Segment::new(4096).expect("a segment");
        let path = format!("/proc/self/fd/{}", own.address().descriptor);
        let file = File::open(path).expect("open for reading");
        let writable = Mapping::of(&file, 4096, libc::PROT_READ | libc::PROT_WRITE);
        assert!(writable.is_err());
    }

    #[test]
    fn memory_that_is_not_there_and_other_files_are_errors() {
        let refused = Segment::new(1 << 60).err().and_then(|e| e.raw_os_error());
        assert_eq!(refused, Some(libc::ENOMEM));
        let own = Segment::new(4096).expect("a segment");
        let of = |change: fn(&mut Address)| {
            let mut address = own.address();
            change(&mut address);
            View::open(std::process::id(), address).err()
        };
        assert!(of(|a| a.inode += 1).is_some_and(|e| e.to_string().contains("another file")));
        assert!(of(|a| a.len += 1).is_some());
        assert!(of(|a| a.descriptor = 1 << 20).is_some());
    }
}
