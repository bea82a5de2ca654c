//! Ranges of virtual addresses, and the physical memory that is mapped to them.

use cudarc::driver::sys;

use super::{Context, Result, calls, check, of_bytes};

/// A range of addresses, parts of which are mapped to memory.
#[derive(Debug)]
pub(crate) struct AddressRange {
    pub base: u64,
    pub bytes: u64,
}

/// Physical memory that can be mapped to addresses.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Physical(sys::CUmemGenericAllocationHandle);

fn placement(context: &Context) -> sys::CUmemAllocationProp {
    // SAFETY: plain data, for which zeros are values: no handle types, no flags.
    let mut wanted: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    wanted.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    wanted.location.id = context.device();
    wanted
}

/// The granularity of mapped memory, bytes.
pub(crate) fn page_bytes(context: &Context) -> Result<u64> {
    let mut bytes = 0;
    let option = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
    context.bind()?;
    // SAFETY: both pointers are valid for the call.
    let got =
        unsafe { calls::cuMemGetAllocationGranularity(&mut bytes, &placement(context), option) };
    check("cuMemGetAllocationGranularity", got)?;
    Ok(bytes as u64)
}

impl AddressRange {
    pub fn reserve(context: &Context, bytes: u64) -> Result<AddressRange> {
        context.bind()?;
        let mut base = 0;
        // SAFETY: the pointer is valid for writing.
        let got = unsafe { calls::cuMemAddressReserve(&mut base, bytes as usize, 0, 0, 0) };
        check("cuMemAddressReserve", got).map_err(of_bytes(bytes))?;
        Ok(AddressRange { base, bytes })
    }

    /// Allocates new memory and maps it to the addresses from `offset` on.
    pub fn map_new(&self, context: &Context, offset: u64, bytes: u64) -> Result<Physical> {
        let memory = Physical::new(context, bytes)?;
        let mapped = self.place(context, offset, bytes, &memory).and_then(|()| {
            let allowed = self.allow(context, offset, bytes);
            if allowed.is_err() {
                self.unmap(context, offset, bytes);
            }
            allowed
        });
        match mapped {
            Ok(()) => Ok(memory),
            Err(e) => {
                memory.release(context);
                Err(e)
            }
        }
    }

    /// Maps memory to the addresses from `offset` on, which are unmapped. It must not be accessed
    /// before [`AddressRange::allow`].
    pub fn place(
        &self,
        context: &Context,
        offset: u64,
        bytes: u64,
        memory: &Physical,
    ) -> Result<()> {
        context.bind()?;
        assert!(
            offset + bytes <= self.bytes,
            "{bytes} bytes at {offset} of a range of {}",
            self.bytes
        );
        // SAFETY: the addresses belong to this range and have no memory, or the driver refuses.
        check("cuMemMap", unsafe {
            calls::cuMemMap(self.base + offset, bytes as usize, 0, memory.0, 0)
        })
        .map_err(of_bytes(bytes))
    }

    /// Lets the device read and write the memory mapped to these addresses.
    pub fn allow(&self, context: &Context, offset: u64, bytes: u64) -> Result<()> {
        context.bind()?;
        let access = sys::CUmemAccessDesc {
            location: placement(context).location,
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the caller has mapped memory to these addresses, and one description is passed.
        check("cuMemSetAccess", unsafe {
            calls::cuMemSetAccess(self.base + offset, bytes as usize, &access, 1)
        })
        .map_err(of_bytes(bytes))
    }

    /// Unmaps the memory of these addresses; work that uses it must be done.
    pub fn unmap(&self, context: &Context, offset: u64, bytes: u64) {
        let _ = context.bind().and_then(|()| {
            // SAFETY: the caller mapped exactly this. A lost context has unmapped it already.
            check("cuMemUnmap", unsafe {
                calls::cuMemUnmap(self.base + offset, bytes as usize)
            })
        });
    }

    /// Frees the addresses, which are no longer mapped.
    pub fn free(&self, context: &Context) {
        let _ = context.bind().and_then(|()| {
            // SAFETY: the range was reserved once, and the caller does not use it again.
            check("cuMemAddressFree", unsafe {
                calls::cuMemAddressFree(self.base, self.bytes as usize)
            })
        });
    }
}

impl Physical {
    /// New memory, not mapped yet.
    pub fn new(context: &Context, bytes: u64) -> Result<Physical> {
        context.bind()?;
        let mut handle = 0;
        // SAFETY: both pointers are valid for the call.
        let got =
            unsafe { calls::cuMemCreate(&mut handle, bytes as usize, &placement(context), 0) };
        check("cuMemCreate", got).map_err(of_bytes(bytes))?;
        Ok(Physical(handle))
    }

    /// Frees the memory once it is mapped nowhere.
    pub fn release(self, context: &Context) {
        // SAFETY: it was created once and is released only here, by value.
        let _ = context
            .bind()
            .and_then(|()| check("cuMemRelease", unsafe { calls::cuMemRelease(self.0) }));
    }
}
