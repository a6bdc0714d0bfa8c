//! The layout of KV in a page.

use std::fmt;
use std::ops::Range;

/// The layout of a model's KV in a page: a sequence of slabs. A device may keep each slab of all
/// pages in a separate allocation; on host and in L3 a page is the concatenation of its slabs.
///
/// The layout is part of the namespace, so pages of different layouts never match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// Slabs of a page, in order.
    pub slabs: Vec<Slab>,
}

/// A part of a page: consecutive layers of the same size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slab {
    /// Layers that the slab holds.
    pub layers: Range<usize>,
    /// Element type.
    pub dtype: KvType,
    /// Content of the slab for each layer.
    pub form: KvForm,
}

/// Content of a slab for one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvForm {
    /// The keys of the page's tokens and then their values, for each head: `[layer][head][key or
    /// value][token][element]`.
    KeysAndValues {
        /// Key-value heads of a layer.
        heads: usize,
        /// Elements of a key or value.
        head_elements: usize,
    },
    /// Only keys or only values: `[layer][head][token][element]`.
    OneOfBoth {
        /// Heads of a layer.
        heads: usize,
        /// Elements of a key or value.
        head_elements: usize,
    },
    /// One vector for each token, shared by all heads, such as latent KV of MLA, scales of
    /// quantised types or keys of an indexer: `[layer][token][element]`.
    Vector {
        /// Elements of the vector.
        elements: usize,
    },
}

/// Element type of KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum KvType {
    /// 32 bits.
    F32,
    /// 16 bits, with the exponent range of 32 bits.
    Bf16,
    /// 16 bits.
    F16,
    /// 8 bits, 4 of them exponent.
    Fp8E4m3,
    /// 8 bits, 5 of them exponent.
    Fp8E5m2,
    /// 8 bits unsigned, for data that the model packs itself.
    U8,
}

/// An invalid layout.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the layout of KV ({layout}) cannot work: {reason}")]
pub struct LayoutError {
    /// The layout.
    pub layout: String,
    /// The reason.
    pub reason: &'static str,
}

impl KvType {
    /// Returns the size of an element.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::Fp8E4m3 | Self::Fp8E5m2 | Self::U8 => 1,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::Fp8E4m3 => "fp8-e4m3",
            Self::Fp8E5m2 => "fp8-e5m2",
            Self::U8 => "u8",
        }
    }
}

impl fmt::Display for KvType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl KvForm {
    /// Returns the number of elements of a token in a layer.
    fn elements(self) -> Option<usize> {
        match self {
            Self::KeysAndValues { heads, head_elements } => {
                heads.checked_mul(head_elements)?.checked_mul(2)
            }
            Self::OneOfBoth { heads, head_elements } => heads.checked_mul(head_elements),
            Self::Vector { elements } => Some(elements),
        }
    }
}

impl Slab {
    fn layer_bytes(&self, page_size: u32) -> Option<usize> {
        let token = self.form.elements()?.checked_mul(self.dtype.bytes())?;
        token.checked_mul(page_size as usize)
    }

    fn bytes(&self, page_size: u32) -> Option<usize> {
        self.layer_bytes(page_size)?.checked_mul(self.layers.len())
    }
}

impl KvLayout {
    /// Creates a layout of one slab with the keys and values of all heads.
    #[must_use]
    pub fn keys_and_values(
        dtype: KvType,
        layers: usize,
        heads: usize,
        head_elements: usize,
    ) -> Self {
        let form = KvForm::KeysAndValues { heads, head_elements };
        Self { slabs: vec![Slab { layers: 0..layers, dtype, form }] }
    }

    /// Returns the layout of pages with `page_size` tokens.
    ///
    /// # Errors
    /// Fails if the layout is invalid.
    pub fn pages(&self, page_size: u32) -> Result<PageLayout, LayoutError> {
        let wrong = |reason| LayoutError { layout: self.to_string(), reason };
        let layers = self.layers();
        let is_held = |layer| self.slabs.iter().any(|slab| slab.layers.contains(&layer));
        let is_empty = |slab: &Slab| slab.bytes(page_size) == Some(0);
        if layers == 0 || self.slabs.iter().any(is_empty) {
            return Err(wrong("every slab must have layers and elements"));
        }
        if !(0..layers).all(is_held) {
            return Err(wrong("a layer is in none of the slabs"));
        }
        let mut sizes = self.slabs.iter().map(|slab| slab.bytes(page_size));
        let bytes = sizes.try_fold(0_usize, |sum, bytes| sum.checked_add(bytes?));
        let bytes = bytes.ok_or_else(|| wrong("a page has too many bytes"))?;
        let mut at = 0;
        for slab in &self.slabs {
            if at % slab.dtype.bytes() != 0 {
                return Err(wrong("the elements of a slab are not aligned: larger types go first"));
            }
            at += slab.bytes(page_size).unwrap_or(0);
        }
        Ok(PageLayout { kv: self.clone(), page_size, layers, bytes })
    }

    /// Returns the number of layers of the model.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.slabs.iter().map(|slab| slab.layers.end).max().unwrap_or(0)
    }

    /// Returns the distinct element types.
    #[must_use]
    pub fn dtypes(&self) -> String {
        let mut types: Vec<KvType> = self.slabs.iter().map(|slab| slab.dtype).collect();
        types.sort_unstable();
        types.dedup();
        let names: Vec<_> = types.into_iter().map(KvType::name).collect();
        names.join("+")
    }
}

/// The form that enters the namespace: any change of an element's position changes it.
impl fmt::Display for KvLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, Slab { layers, dtype, form }) in self.slabs.iter().enumerate() {
            let comma = if place > 0 { ", " } else { "" };
            let Range { start, end } = layers;
            write!(f, "{comma}layers {start}..{end} of ")?;
            match form {
                KvForm::KeysAndValues { heads, head_elements } => {
                    write!(f, "{heads} x {head_elements} keys and values")?;
                }
                KvForm::OneOfBoth { heads, head_elements } => {
                    write!(f, "{heads} x {head_elements}")?
                }
                KvForm::Vector { elements } => write!(f, "{elements}")?,
            }
            write!(f, " {dtype}")?;
        }
        Ok(())
    }
}

/// A layout with its page size, which determines all positions in a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageLayout {
    kv: KvLayout,
    page_size: u32,
    layers: usize,
    bytes: usize,
}

impl PageLayout {
    /// Returns the KV layout.
    #[must_use]
    pub fn kv(&self) -> &KvLayout {
        &self.kv
    }

    /// Returns the number of tokens in a page.
    #[must_use]
    pub fn page_size(&self) -> u32 {
        self.page_size
    }

    /// Returns the size of a page.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the number of layers of the model.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// Iterates over the byte ranges of the slabs in a page.
    pub fn slabs(&self) -> impl Iterator<Item = Range<usize>> {
        let mut at = 0;
        self.kv.slabs.iter().map(move |slab| {
            let first = at;
            at += slab.bytes(self.page_size).expect("a page can be counted");
            first..at
        })
    }

    /// Iterates over the byte ranges of a layer in a page: one for each slab that holds it.
    pub fn layer(&self, layer: usize) -> impl Iterator<Item = Range<usize>> {
        self.kv.slabs.iter().zip(self.slabs()).filter_map(move |(slab, place)| {
            let within = slab.layers.contains(&layer).then(|| layer - slab.layers.start)?;
            let bytes = slab.layer_bytes(self.page_size).expect("a page can be counted");
            let first = place.start + within * bytes;
            Some(first..first + bytes)
        })
    }
}

impl fmt::Display for PageLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes for {} tokens: {}", self.bytes, self.page_size, self.kv)
    }
}

/// The KV of a model with one slab of `f32`, as CPU models have it.
///
/// For each layer and each KV head a page holds the keys of its tokens and then their values:
/// `[layer][head][key or value][token][element]`, all `f32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Layers of the model.
    pub layers: usize,
    /// Key and value heads of a layer.
    pub heads: usize,
    /// Elements of a key or value.
    pub head_elements: usize,
}

impl KvShape {
    /// Returns the layout of its pages.
    #[must_use]
    pub fn layout(&self) -> KvLayout {
        KvLayout::keys_and_values(KvType::F32, self.layers, self.heads, self.head_elements)
    }

    /// Returns the number of `f32` in a page of `page_size` tokens.
    #[must_use]
    pub fn page_elements(&self, page_size: u32) -> usize {
        self.layers * self.heads * 2 * page_size as usize * self.head_elements
    }

    /// Returns the size in bytes of a page of `page_size` tokens.
    #[must_use]
    pub fn page_bytes(&self, page_size: u32) -> usize {
        self.page_elements(page_size) * size_of::<f32>()
    }

    /// Returns the position of the keys of a layer and head in a page; their values follow them.
    #[must_use]
    pub fn keys_at(&self, layer: usize, head: usize, page_size: u32) -> usize {
        (layer * self.heads + head) * 2 * page_size as usize * self.head_elements
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slab(layers: Range<usize>, dtype: KvType, form: KvForm) -> Slab {
        Slab { layers, dtype, form }
    }

    #[test]
    fn layers_of_a_page_are_consecutive() {
        let layout = KvLayout::keys_and_values(KvType::Bf16, 3, 2, 8).pages(16).unwrap();
        assert_eq!(layout.bytes(), 3 * 2 * 2 * 16 * 8 * 2);
        let layers: Vec<_> = (0..3).flat_map(|layer| layout.layer(layer)).collect();
        assert_eq!(layers, [0..1024, 1024..2048, 2048..3072]);
        assert_eq!(layout.kv().to_string(), "layers 0..3 of 2 x 8 keys and values bf16");
        let shape = KvShape { layers: 3, heads: 2, head_elements: 8 };
        assert_eq!(shape.layout().pages(16).unwrap().bytes(), shape.page_bytes(16));
    }

    #[test]
    fn finds_a_layer_in_every_slab_that_holds_it() {
        // Latent KV of a small type with a scale for each token, and an indexer's keys for some
        // layers.
        let layout = KvLayout {
            slabs: vec![
                slab(0..2, KvType::F32, KvForm::Vector { elements: 1 }),
                slab(0..2, KvType::Fp8E4m3, KvForm::Vector { elements: 576 }),
                slab(1..2, KvType::Fp8E4m3, KvForm::OneOfBoth { heads: 1, head_elements: 128 }),
            ],
        };
        assert_eq!(layout.dtypes(), "f32+fp8-e4m3");
        let pages = layout.pages(4).unwrap();
        assert_eq!(pages.slabs().collect::<Vec<_>>(), [0..32, 32..4640, 4640..5152]);
        assert_eq!(pages.layer(0).collect::<Vec<_>>(), [0..16, 32..2336]);
        assert_eq!(pages.layer(1).collect::<Vec<_>>(), [16..32, 2336..4640, 4640..5152]);
        assert_eq!(pages.bytes(), 5152);
        let all: usize = (0..2).flat_map(|layer| pages.layer(layer)).map(|part| part.len()).sum();
        assert_eq!(all, pages.bytes(), "every byte is of one layer");
    }

    #[test]
    fn rejects_invalid_layouts() {
        let refused = |slabs: Vec<Slab>| KvLayout { slabs }.pages(16).unwrap_err().to_string();
        let vector = |elements| KvForm::Vector { elements };
        for (slabs, reason) in [
            (vec![], "layers and elements"),
            (vec![slab(0..2, KvType::F16, vector(0))], "layers and elements"),
            (vec![slab(1..2, KvType::F16, vector(8))], "in none of the slabs"),
            (vec![slab(0..2, KvType::F16, vector(usize::MAX / 2))], "too many bytes"),
        ] {
            let error = refused(slabs);
            assert!(error.contains(reason), "{error}");
        }
        let unaligned = KvLayout {
            slabs: vec![slab(0..1, KvType::U8, vector(1)), slab(0..1, KvType::F32, vector(1))],
        };
        let error = unaligned.pages(1).unwrap_err().to_string();
        assert_eq!(
            error,
            "the layout of KV (layers 0..1 of 1 u8, layers 0..1 of 1 f32) cannot work: the elements of a \
             slab are not aligned: larger types go first"
        );
    }

    #[test]
    fn different_layouts_have_different_names() {
        let of = |dtype, heads, form: fn(usize, usize) -> KvForm| {
            KvLayout { slabs: vec![slab(0..4, dtype, form(heads, 64))] }.to_string()
        };
        let both = |heads, head_elements| KvForm::KeysAndValues { heads, head_elements };
        let one = |heads, head_elements| KvForm::OneOfBoth { heads, head_elements };
        let vector = |heads, head_elements| KvForm::Vector { elements: heads * head_elements };
        let mut all = vec![
            of(KvType::F32, 8, both),
            of(KvType::Bf16, 8, both),
            of(KvType::F16, 8, both),
            of(KvType::Fp8E4m3, 8, both),
            of(KvType::Fp8E5m2, 8, both),
            of(KvType::F32, 4, both),
            of(KvType::F32, 8, one),
            of(KvType::F32, 8, vector),
            KvLayout::keys_and_values(KvType::F32, 5, 8, 64).to_string(),
        ];
        let count = all.len();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), count, "{all:?}");
    }
}
