//! Values that stay on the device between runs, and the results of a run.

use std::cell::OnceCell;
use std::fmt;
use std::sync::Arc;

use ndarray::{ArrayD, ArrayViewD, IxDyn};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::memory::{Element, Memory, Region};

use crate::backend::Backend;
use crate::data::{HostArray, format};
use crate::error::{Error, Result};
use crate::feed::Lengths;

/// A value that stays on the device until it is [freed](crate::Session::free) or donated, or the
/// session is dropped. Handles are small; copies of a handle name the same value.
#[derive(Clone, Debug)]
pub struct Buffer {
    pub(crate) session: u64,
    pub(crate) slot: usize,
    pub(crate) generation: u64,
    pub(crate) name: Arc<str>,
    pub(crate) dtype: DType,
    pub(crate) lengths: Lengths,
}

impl Buffer {
    /// Gives the bytes to the run this is fed to, as an input whose bytes an output reuses
    /// ([`Trace::donate`](crate::Trace::donate)); every handle of the buffer is then dead, and
    /// [`Output::buffer`] is the new one. Fed to another input it is an error, and the buffer
    /// stays.
    pub fn donate(self) -> Donated {
        Donated(self)
    }

    /// The lengths of the axes.
    pub fn shape(&self) -> &[usize] {
        &self.lengths
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }
}

/// A [`Buffer`] that a run may overwrite.
#[derive(Debug)]
pub struct Donated(pub(crate) Buffer);

/// A region of a session's memory, copied to the host on access if it is not there already.
pub(crate) struct Shown<'s> {
    backend: &'s dyn Backend,
    region: Region,
    copy: OnceCell<(Memory, Region)>,
}

impl<'s> Shown<'s> {
    pub fn new(backend: &'s dyn Backend, region: Region) -> Self {
        Shown {
            backend,
            region,
            copy: OnceCell::new(),
        }
    }

    /// Where it lies on the device.
    pub fn region(&self) -> Region {
        self.region
    }

    /// The region in memory of the host. Waits for the runs that write it.
    fn get(&self) -> Result<(&Memory, Region)> {
        match (self.backend.host(), self.copy.get()) {
            (Some(memory), _) => Ok((memory, self.region)),
            (None, Some((memory, region))) => Ok((memory, *region)),
            (None, None) => {
                let fetched = self.backend.download(&self.region)?;
                let (memory, region) = self.copy.get_or_init(|| fetched);
                Ok((memory, *region))
            }
        }
    }
}

/// One output of a run, in the session's memory: readable until the next run. [`Output::array`]
/// copies it to the host.
pub struct Output<'s> {
    pub(crate) shown: Shown<'s>,
    pub(crate) dtype: DType,
    pub(crate) lengths: Lengths,
    pub(crate) buffer: Option<Buffer>,
}

impl fmt::Debug for Output<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.dtype, &self.lengths[..])
    }
}

/// The elements as text, then type and shape: those of arrays of more than 1,000 elements shortened
/// to three at each end of an axis.
///
/// ```
/// # use slabwise::prelude::*;
/// # let mut session = Session::new(Device::Cpu, Params::seeded(0))?;
/// # let trace = Trace::inference();
/// # let x = trace.input("x", F32, (2, 2));
/// # let program = session.compile(&trace, [x * 2.0])?;
/// let [y] = session.run(&program, &[0.25f32, 1.0, -0.5, 8.0])?;
/// assert_eq!(y.to_string(), "[[ 0.5,  2.0],\n [-1.0, 16.0]] f32 [2, 2]");
/// # Ok::<(), slabwise::Error>(())
/// ```
impl fmt::Display for Output<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.shown.get() {
            Ok((memory, region)) => {
                let bytes = memory.bytes(&region);
                let at = |at: usize| {
                    let each = self.dtype.bytes();
                    element(self.dtype, &bytes[at * each..(at + 1) * each])
                };
                format(f, self.dtype, &self.lengths, at)
            }
            Err(error) => write!(f, "(not known, because the run failed: {error})"),
        }
    }
}

/// The value of an element's bytes.
fn element(dtype: DType, bytes: &[u8]) -> f64 {
    match (dtype, bytes) {
        (DType::F32, &[a, b, c, d]) => f32::from_ne_bytes([a, b, c, d]).into(),
        (DType::I32, &[a, b, c, d]) => i32::from_ne_bytes([a, b, c, d]).into(),
        (DType::F16, &[a, b]) => half::f16::from_ne_bytes([a, b]).into(),
        (DType::BF16, &[a, b]) => half::bf16::from_ne_bytes([a, b]).into(),
        (_, bytes) => bytes.first().copied().unwrap_or(0).into(),
    }
}

impl Output<'_> {
    /// The first element as a number, for instance a loss or an accuracy. NaN if there is no
    /// element, and if the run failed on a device that reports the failure only now; the next run
    /// then says why.
    pub fn item(&self) -> f32 {
        self.number().unwrap_or_else(|error| {
            self.shown.backend.defer(error);
            f32::NAN
        })
    }

    /// The first element. Waits for the run, and copies only this element from another device.
    fn number(&self) -> Result<f32> {
        if self.lengths.contains(&0) {
            return Ok(f32::NAN);
        }
        let read = |memory: &Memory, first: &Region| match self.dtype {
            DType::F32 => memory.elements::<f32>(first)[0],
            DType::F16 => memory.elements::<half::f16>(first)[0].to_f32(),
            DType::BF16 => memory.elements::<half::bf16>(first)[0].to_f32(),
            DType::I32 => memory.elements::<i32>(first)[0] as f32,
            DType::U8 | DType::Bool => f32::from(memory.bytes(first)[0]),
        };
        let bytes = self.dtype.bytes() as u64;
        match self.shown.copy.get() {
            Some((memory, region)) => Ok(read(memory, &region.part(0, bytes))),
            None => self
                .shown
                .backend
                .map_read(&self.shown.region.part(0, bytes), read),
        }
    }

    /// The value of a scalar output, such as a loss; an error if the output is not an f32 scalar.
    pub(crate) fn scalar(&self) -> Result<f32> {
        if self.dtype != DType::F32 || !self.lengths.is_empty() {
            return Err(Error::Value(format!(
                "the first output is {} {:?}, not an f32 scalar",
                self.dtype, self.lengths
            )));
        }
        self.number()
    }

    /// The lengths of the axes.
    pub fn shape(&self) -> &[usize] {
        &self.lengths
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The bytes, row-major.
    ///
    /// # Errors
    /// If the run failed on a device that reports the failure only now.
    pub fn bytes(&self) -> Result<&[u8]> {
        self.shown
            .get()
            .map(|(memory, region)| memory.bytes(&region))
    }

    /// The elements, in place. Truth values are read as `u8`. An error if the output is of another
    /// type.
    pub fn view<T: Element>(&self) -> Result<ArrayViewD<'_, T>> {
        let bool_as_byte = self.dtype == DType::Bool && T::DTYPE == DType::U8;
        if T::DTYPE != self.dtype && !bool_as_byte {
            return Err(Error::Value(format!(
                "the values are {}, not {}; request them in their type, or cast in the program",
                self.dtype,
                T::DTYPE
            )));
        }
        let (memory, region) = self.shown.get()?;
        let elements = memory.elements::<T>(&region);
        ArrayViewD::from_shape(IxDyn(&self.lengths), elements)
            .map_err(|e| Error::Internal(e.to_string()))
    }

    /// The elements, copied into an array.
    pub fn array<T: Element>(&self) -> Result<ArrayD<T>> {
        Ok(self.view::<T>()?.to_owned())
    }

    /// The elements, copied into an array of their type.
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// # let mut session = Session::new(Device::Cpu, Params::seeded(0))?;
    /// # let trace = Trace::inference();
    /// # let x = trace.input("x", F32, (3,));
    /// # let program = session.compile(&trace, [x.exp()])?;
    /// # let path = std::env::temp_dir().join("slabwise-doc-y.npy");
    /// let [y] = session.run(&program, &[1.0f32, 2.0, 3.0])?;
    /// slabwise::data::npy::write(&path, &y.to_host()?)?;
    /// # Ok::<(), slabwise::Error>(())
    /// ```
    ///
    /// # Errors
    /// See [`Output::bytes`].
    pub fn to_host(&self) -> Result<HostArray> {
        Ok(match self.dtype {
            DType::F32 => HostArray::F32(self.array()?),
            DType::F16 => HostArray::F16(self.array()?),
            DType::BF16 => HostArray::BF16(self.array()?),
            DType::I32 => HostArray::I32(self.array()?),
            DType::U8 => HostArray::U8(self.array()?),
            DType::Bool => HostArray::Bool(self.array()?),
        })
    }

    /// The buffer this output took over, if its input was donated. It outlives the next run and can
    /// be fed to any program of the session. For a program without donated inputs,
    /// [`Session::run_resident`](crate::Session::run_resident) gives buffers.
    pub fn buffer(&self) -> Option<Buffer> {
        self.buffer.clone()
    }
}
