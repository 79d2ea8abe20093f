//! A paged KV cache in Rust, held to the laws over a pipe (docs/protocol.md and docs/laws.md).
//!
//!     rustc -O examples/rust/engine.rs -o engine
//!     tinyllm check --exec ./engine
//!
//! The cache is the one of tinyllm/infer/paged.py: a block table per sequence, a reference count per block, copy on
//! write, appends that happen whole or not at all. `--bug NAME` breaks it on purpose, to watch the kit find out.
//! Numbers in brackets are laws.

use std::collections::HashMap;
use std::io::{self, BufRead, Write};
use std::num::IntErrorKind;

/// What `hello` answers: all that the kit can check.
const OFFERS: &str = "block-tables blocks_needed check contents counts exact-cost exact-errors fork \
                      independent-layers lazy-copy page_table truncate";

/// What `--bug NAME` does: first the laws that are broken, then the manners of the protocol, from request --after on.
const BUGS: [(&str, &str); 15] = [
    ("no-refs", "a fork takes no references"),
    ("in-place", "an append writes into shared blocks"),
    ("tail-only", "copy on write looks at the last block of a table alone"),
    ("leak", "free releases the first block alone"),
    ("eager", "an append that ends on a boundary takes a block more"),
    ("partial", "an append that is refused keeps what it took"),
    ("whole-blocks", "gather returns whole blocks"),
    ("k-into-v", "K is stored as V too"),
    ("copies-free", "blocks_needed forgets the copies"),
    ("kept-tail", "truncate keeps the blocks past the new end"),
    ("full-pages", "page_table says that every last page is full"),
    ("garbage", "answers nonsense"),
    ("hang", "does not answer"),
    ("crash", "panics"),
    ("twice", "answers twice"),
];

/// Why a request is refused: the name of the error, and what to tell a person.
struct Refusal(&'static str, String);
type Outcome<T> = Result<T, Refusal>;

fn refuse<T>(name: &'static str, text: impl Into<String>) -> Outcome<T> {
    Err(Refusal(name, text.into()))
}

struct Sequence {
    table: Vec<usize>, // block ids, in position order
    lens: Vec<usize>,  // positions that each layer holds
}

struct Cache {
    num_blocks: usize,
    block_size: usize,
    layers: usize,
    heads: usize,
    dims: usize,
    k: Vec<u16>, // float16 bits, [block, layer, head, slot, dim]: a block is one run of memory
    v: Vec<u16>,
    refs: Vec<u32>,   // how many tables hold each block [6]
    free: Vec<usize>, // a stack: what was freed last goes out next
    seqs: HashMap<i128, Sequence>,
    bug: String,
}

impl Cache {
    fn new(sizes: [i128; 5], bug: &str) -> Outcome<Cache> {
        for (name, size) in ["num_blocks", "block_size", "n_layers", "n_kv_heads", "d_head"].iter().zip(sizes) {
            if size < 1 {
                return refuse("ValueError", format!("{name} is {size}; it must be at least 1"));
            }
        }
        if sizes[0] > i32::MAX as i128 {
            return refuse("ValueError", format!("num_blocks is {}; it must be at most {}", sizes[0], i32::MAX));
        }
        let [num_blocks, block_size, layers, heads, dims] = sizes.map(|size| size as usize);
        let scalars = sizes.iter().try_fold(1usize, |all, &size| all.checked_mul(size as usize));
        Ok(Cache {
            num_blocks,
            block_size,
            layers,
            heads,
            dims,
            k: zeros(scalars)?,
            v: zeros(scalars)?,
            refs: vec![0; num_blocks],
            free: (0..num_blocks).rev().collect(),
            seqs: HashMap::new(),
            bug: bug.to_string(),
        })
    }

    /// Start an empty sequence; takes no block [13].
    fn add(&mut self, id: i128) -> Outcome<()> {
        self.unused(id)?;
        self.seqs.insert(id, Sequence { table: Vec::new(), lens: vec![0; self.layers] });
        Ok(())
    }

    /// Start `child` as an equal of `parent`, sharing its blocks; takes no block [7, 13].
    fn fork(&mut self, parent: i128, child: i128) -> Outcome<()> {
        let Sequence { table, lens } = self.live(parent)?;
        let copy = Sequence { table: table.clone(), lens: lens.clone() };
        self.unused(child)?;
        if self.bug != "no-refs" {
            for &block in &copy.table {
                self.refs[block] += 1;
            }
        }
        self.seqs.insert(child, copy);
        Ok(())
    }

    /// Add `tokens` positions to one layer; K and V are [heads, tokens, dims]. All or nothing [1-4, 8-10].
    fn append(&mut self, id: i128, layer: i128, tokens: i128, k: &[f32], v: &[f32]) -> Outcome<()> {
        let Sequence { table, lens } = self.live(id)?;
        let layer = self.layer(layer)?;
        if tokens < 1 {
            return refuse("ValueError", format!("T is {tokens}; it must be at least 1"));
        }
        let due = (tokens as usize).checked_mul(self.heads * self.dims);
        if due != Some(k.len()) || due != Some(v.len()) {
            let shape = format!("[{}, {tokens}, {}]", self.heads, self.dims);
            return refuse("ValueError", format!("{} and {} values of K and V for {shape}", k.len(), v.len()));
        }

        let (start, stop) = (lens[layer], lens[layer] + tokens as usize);
        let (shared, more) = self.plan(table, start, stop);
        let need = shared.len() + more;
        if need > self.free.len() {
            let text = format!("the append needs {need} blocks, but only {} are free", self.free.len());
            if self.bug == "partial" {
                let taken = std::mem::take(&mut self.free);
                taken.iter().for_each(|&block| self.refs[block] = 1);
                self.seqs.get_mut(&id).unwrap().table.extend(taken);
            }
            return refuse("OutOfBlocks", text); // [9]
        }

        // Claim: first a block for each copy, then those past the end of the table. From here on nothing can fail.
        let mut table = table.clone();
        let mut claimed = self.free.split_off(self.free.len() - need);
        for &i in &shared {
            let (original, copy) = (table[i], claimed.pop().unwrap());
            self.copy_block(original, copy);
            self.refs[original] -= 1;
            self.refs[copy] = 1;
            table[i] = copy;
        }
        while let Some(block) = claimed.pop() {
            self.clear_block(block); // slots that no layer has appended to read zero [11]
            self.refs[block] = 1;
            table.push(block);
        }

        // Write.
        for head in 0..self.heads {
            for t in 0..tokens as usize {
                let to = self.at(table[(start + t) / self.block_size], layer, head, (start + t) % self.block_size);
                let from = (head * tokens as usize + t) * self.dims;
                for d in 0..self.dims {
                    self.k[to + d] = float16(k[from + d]);
                    self.v[to + d] = float16(if self.bug == "k-into-v" { k[from + d] } else { v[from + d] });
                }
            }
        }

        // Commit.
        let sequence = self.seqs.get_mut(&id).unwrap();
        sequence.table = table;
        sequence.lens[layer] = stop;
        Ok(())
    }

    /// Of an append to positions [start, stop): the places in the table to be copied, and how many blocks come
    /// after its end. Blocks [first, last) of the table are those that the new positions fall into [8, 9].
    fn plan(&self, table: &[usize], start: usize, stop: usize) -> (Vec<usize>, usize) {
        let (first, mut last) = (start / self.block_size, stop.div_ceil(self.block_size));
        if self.bug == "eager" {
            last = stop / self.block_size + 1;
        }
        let mut shared: Vec<usize> =
            (first..last.min(table.len())).filter(|&i| self.refs[table[i]] > 1).collect();
        match self.bug.as_str() {
            "in-place" => shared.clear(),
            "tail-only" => shared.retain(|&i| i + 1 == table.len()),
            _ => (),
        }
        (shared, last.saturating_sub(table.len()))
    }

    /// How many blocks an append of `tokens` positions takes now [16].
    fn blocks_needed(&self, id: i128, layer: i128, tokens: i128) -> Outcome<usize> {
        let Sequence { table, lens } = self.live(id)?;
        let start = lens[self.layer(layer)?];
        if tokens < 1 {
            return refuse("ValueError", format!("T is {tokens}; it must be at least 1"));
        }
        let stop = start.saturating_add(tokens as usize);
        let (shared, more) = self.plan(table, start, stop);
        Ok(more + if self.bug == "copies-free" { 0 } else { shared.len() })
    }

    /// Cut every layer to at most `length` positions, and drop the blocks that none of them reaches then [17].
    fn truncate(&mut self, id: i128, length: i128) -> Outcome<()> {
        let longest = *self.live(id)?.lens.iter().max().unwrap();
        if !(0..=longest as i128).contains(&length) {
            return refuse("ValueError", format!("length {length} is outside [0, {longest}]"));
        }
        let (length, block_size) = (length as usize, self.block_size);
        let sequence = self.seqs.get_mut(&id).unwrap();
        sequence.lens.iter_mut().for_each(|len| *len = length.min(*len));
        if self.bug != "kept-tail" {
            let dropped = sequence.table.split_off(length.div_ceil(block_size));
            self.release(&dropped);
        }
        Ok(())
    }

    /// `indptr`, `indices` and `last_page_len` of the blocks that the layer of each sequence covers [18].
    fn page_table(&self, layer: i128, ids: &[i128]) -> Outcome<Vec<usize>> {
        let layer = self.layer(layer)?;
        let (mut indptr, mut indices, mut last) = (vec![0], Vec::new(), Vec::new());
        for &id in ids {
            let Sequence { table, lens } = self.live(id)?;
            let pages = lens[layer].div_ceil(self.block_size);
            indices.extend(&table[..pages]);
            indptr.push(indices.len());
            let full = self.bug == "full-pages" && pages > 0;
            let before = pages.saturating_sub(1) * self.block_size;
            last.push(if full { self.block_size } else { lens[layer] - before });
        }
        Ok([indptr, indices, last].concat())
    }

    /// Hold counts, free list and tables against each other [19].
    fn check(&self) -> Outcome<()> {
        let mut held = vec![0; self.num_blocks];
        for (id, Sequence { table, lens }) in &self.seqs {
            let (due, have) = (lens.iter().max().unwrap().div_ceil(self.block_size), table.len());
            if due != have {
                return refuse("AssertionError", format!("law 2: sequence {id} has {have} blocks, not {due}"));
            }
            table.iter().for_each(|&block| held[block] += 1);
        }
        if let Some(block) = (0..self.num_blocks).find(|&block| held[block] != self.refs[block]) {
            let (said, found) = (self.refs[block], held[block]);
            return refuse("AssertionError", format!("law 6: block {block} is counted {said} times, held by {found}"));
        }
        let mut free = vec![false; self.num_blocks];
        self.free.iter().for_each(|&block| free[block] = true);
        let unheld = held.iter().filter(|&&count| count == 0).count();
        if self.free.len() != unheld || (0..self.num_blocks).any(|block| free[block] == (held[block] > 0)) {
            return refuse("AssertionError", "law 5: the free blocks are not those that no table holds");
        }
        Ok(())
    }

    /// How many positions the layer holds [4].
    fn len(&self, id: i128, layer: i128) -> Outcome<usize> {
        Ok(self.live(id)?.lens[self.layer(layer)?])
    }

    /// The number of positions, and all K and V of the layer, [heads, positions, dims] [3].
    fn gather(&self, id: i128, layer: i128) -> Outcome<(usize, Vec<u16>, Vec<u16>)> {
        let mut len = self.len(id, layer)?;
        if self.bug == "whole-blocks" {
            len = len.div_ceil(self.block_size) * self.block_size;
        }
        let table = &self.live(id)?.table;
        let (mut k, mut v) = (Vec::new(), Vec::new());
        for head in 0..self.heads {
            for p in 0..len {
                let from = self.at(table[p / self.block_size], layer as usize, head, p % self.block_size);
                k.extend(&self.k[from..from + self.dims]);
                v.extend(&self.v[from..from + self.dims]);
            }
        }
        Ok((len, k, v))
    }

    /// Drop a sequence: blocks that no other table holds are free again, and so is its id [6, 13].
    fn drop_seq(&mut self, id: i128) -> Outcome<()> {
        self.live(id)?;
        let mut table = self.seqs.remove(&id).unwrap().table;
        if self.bug == "leak" {
            table.truncate(1);
        }
        self.release(&table);
        Ok(())
    }

    /// One holder less for each block; free again where it was the last [6].
    fn release(&mut self, blocks: &[usize]) {
        for &block in blocks.iter().rev() {
            if self.refs[block] == 1 {
                self.free.push(block);
            }
            self.refs[block] = self.refs[block].saturating_sub(1);
        }
    }

    fn live(&self, id: i128) -> Outcome<&Sequence> {
        let text = || format!("sequence {id} is not one of the {} live ones", self.seqs.len());
        self.seqs.get(&id).ok_or_else(|| Refusal("KeyError", text()))
    }

    fn unused(&self, id: i128) -> Outcome<()> {
        match self.seqs.contains_key(&id) {
            true => refuse("ValueError", format!("sequence {id} is live; its id can be used once it is freed")),
            false => Ok(()),
        }
    }

    fn layer(&self, layer: i128) -> Outcome<usize> {
        match (0..self.layers as i128).contains(&layer) {
            true => Ok(layer as usize),
            false => refuse("IndexError", format!("layer {layer} is outside [0, {})", self.layers)),
        }
    }

    fn at(&self, block: usize, layer: usize, head: usize, slot: usize) -> usize {
        (((block * self.layers + layer) * self.heads + head) * self.block_size + slot) * self.dims
    }

    fn copy_block(&mut self, from: usize, to: usize) {
        let (from, past, to) = (self.at(from, 0, 0, 0), self.at(from + 1, 0, 0, 0), self.at(to, 0, 0, 0));
        self.k.copy_within(from..past, to);
        self.v.copy_within(from..past, to);
    }

    fn clear_block(&mut self, block: usize) {
        let all = self.at(block, 0, 0, 0)..self.at(block + 1, 0, 0, 0);
        self.k[all.clone()].fill(0);
        self.v[all].fill(0);
    }
}

fn zeros(count: Option<usize>) -> Outcome<Vec<u16>> {
    let mut values = Vec::new();
    match count.map(|count| values.try_reserve_exact(count)) {
        Some(Ok(())) => values.resize(count.unwrap(), 0),
        _ => return refuse("MemoryError", "there is no memory for that many blocks"),
    }
    Ok(values)
}

/// The bits of the nearest float16, of two equally near the even one: overflow gives infinity, NaN stays NaN [3].
fn float16(value: f32) -> u16 {
    let sign = (value.to_bits() >> 16 & 0x8000) as u16;
    let magnitude = value.to_bits() & 0x7fff_ffff;
    let exponent = (magnitude >> 23) as i32 - 127;
    sign | match magnitude {
        0x7f80_0001.. => 0x7e00,                                // NaN
        0x477f_f000.. => 0x7c00,                                // 65520 and more
        _ if exponent >= -14 => rounded(magnitude - (112 << 23), 13), // the exponent's bias is 15, not 127
        _ if exponent >= -25 => rounded(magnitude & 0x7f_ffff | 1 << 23, (-1 - exponent) as u32), // units of 2^-24
        _ => 0,
    }
}

/// `value >> shift`, rounded to nearest, ties to even. A carry out of the fraction rightly raises the exponent.
fn rounded(value: u32, shift: u32) -> u16 {
    let (kept, rest, half) = (value >> shift, value & ((1 << shift) - 1), 1 << (shift - 1));
    (kept + u32::from(rest > half || rest == half && kept & 1 == 1)) as u16
}

/// Answer one request. `cache` is None before `new` and after `close`; a refused request changes nothing [10].
fn answer(cache: &mut Option<Cache>, line: &str, bug: &str) -> Outcome<String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let (name, args) = words.split_first().map_or(("", &[][..]), |(name, args)| (*name, args));
    let count = match name {
        "hello" | "stats" | "freeblocks" | "close" | "check" => 0,
        "add" | "table" | "free" => 1,
        "fork" | "len" | "gather" | "truncate" => 2,
        "needed" => 3,
        "new" | "append" => 5,
        "pages" => args.len().max(1),
        _ => return refuse("ProtocolError", format!("there is no request {name:?}")),
    };
    if args.len() != count {
        return refuse("ProtocolError", format!("{name} takes {count} arguments, not {}", args.len()));
    }
    match name {
        "hello" => return Ok(format!("ok {OFFERS}")),
        "close" => *cache = None,
        "new" => {
            let mut sizes = [0; 5];
            for (size, word) in sizes.iter_mut().zip(args) {
                *size = integer(word)?;
            }
            *cache = Some(Cache::new(sizes, bug)?);
        }
        _ => {
            let cache = cache.as_mut().ok_or(Refusal("ValueError", "the cache is closed".to_string()))?; // [14]
            return on_cache(cache, name, args);
        }
    }
    Ok("ok".to_string())
}

fn on_cache(cache: &mut Cache, name: &str, args: &[&str]) -> Outcome<String> {
    let number = |i: usize| integer(args[i]);
    match name {
        "add" => cache.add(number(0)?)?,
        "fork" => cache.fork(number(0)?, number(1)?)?,
        "append" => cache.append(number(0)?, number(1)?, number(2)?, &floats(args[3])?, &floats(args[4])?)?,
        "free" => cache.drop_seq(number(0)?)?,
        "truncate" => cache.truncate(number(0)?, number(1)?)?,
        "check" => cache.check()?,
        "needed" => return Ok(numbers(&[cache.blocks_needed(number(0)?, number(1)?, number(2)?)?])),
        "pages" => {
            let ids: Outcome<Vec<i128>> = args[1..].iter().map(|word| integer(word)).collect();
            return Ok(numbers(&cache.page_table(number(0)?, &ids?)?));
        }
        "table" => return Ok(numbers(&cache.live(number(0)?)?.table)),
        "len" => return Ok(numbers(&[cache.len(number(0)?, number(1)?)?])),
        "gather" => {
            let (len, k, v) = cache.gather(number(0)?, number(1)?)?;
            return Ok(format!("ok {len} {} {}", hex(&k), hex(&v)));
        }
        "stats" => return Ok(numbers(&[cache.free.len(), cache.num_blocks - cache.free.len(), 0, 0])), // [5]
        _ => return Ok(numbers(&[cache.free.len()])), // freeblocks
    }
    Ok("ok".to_string())
}

fn numbers(all: &[usize]) -> String {
    let words: Vec<String> = all.iter().map(|number| format!(" {number}")).collect();
    format!("ok{}", words.concat())
}

/// A word as an integer; what is none is a TypeError [15].
fn integer(word: &str) -> Outcome<i128> {
    word.parse().or_else(|error: std::num::ParseIntError| match error.kind() {
        IntErrorKind::PosOverflow | IntErrorKind::NegOverflow => {
            refuse("ValueError", format!("{word} is beyond the 128 bits of this engine"))
        }
        _ => refuse("TypeError", format!("{word:?} is no integer")),
    })
}

/// Little-endian float32 from hex; `-` is none at all.
fn floats(word: &str) -> Outcome<Vec<f32>> {
    let digit = |c: u8| (c as char).to_digit(16).map(|digit| digit as u8);
    let pairs = if word == "-" { &[] } else { word.as_bytes() };
    let bytes: Option<Vec<u8>> =
        pairs.chunks(2).map(|pair| Some(digit(pair[0])? << 4 | digit(*pair.get(1)?)?)).collect();
    match bytes {
        Some(bytes) if bytes.len() % 4 == 0 => {
            Ok(bytes.chunks(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
        }
        _ => refuse("ValueError", "the data is not the hex of float32 values"),
    }
}

fn hex(values: &[u16]) -> String {
    if values.is_empty() {
        return "-".to_string();
    }
    let digits = |byte: u8| [byte >> 4, byte & 15].map(|digit| b"0123456789abcdef"[digit as usize] as char);
    values.iter().flat_map(|value| value.to_le_bytes()).flat_map(digits).collect()
}

fn main() -> io::Result<()> {
    let (bug, after) = options();
    let mut cache = None;
    let mut input = io::stdin().lock();
    let mut output = io::stdout().lock();
    let mut line = Vec::new();
    for request in 0u64.. {
        line.clear();
        if input.read_until(b'\n', &mut line)? == 0 {
            break; // the other side is gone
        }
        let misbehave = if request >= after { bug.as_str() } else { "" };
        match misbehave {
            "garbage" => output.write_all(b"lorem ipsum\n")?,
            "hang" => std::thread::sleep(std::time::Duration::MAX),
            "crash" => panic!("--bug crash"),
            _ => {
                let reply = match answer(&mut cache, &String::from_utf8_lossy(&line), &bug) {
                    Ok(reply) => reply,
                    Err(Refusal(name, text)) => format!("error {name} {text}"),
                };
                let times = if misbehave == "twice" { 2 } else { 1 };
                output.write_all(format!("{reply}\n").repeat(times).as_bytes())?;
            }
        }
        output.flush()?;
    }
    Ok(())
}

/// `--bug NAME`, or "", and `--after N`. Ends the program for `--help`, or when they make no sense.
fn options() -> (String, u64) {
    let (mut bug, mut after) = (String::new(), 100);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let value = args.next().unwrap_or_default();
        match arg.as_str() {
            "--bug" if BUGS.iter().any(|(name, _)| *name == value) => bug = value,
            "--after" if value.parse::<u64>().is_ok() => after = value.parse().unwrap(),
            _ => {
                println!("A paged KV cache that answers requests on its standard input: see docs/protocol.md.\n");
                println!("  --bug NAME   break it:");
                BUGS.iter().for_each(|(name, what)| println!("      {name:14} {what}"));
                println!("  --after N    the last four begin after N requests (default 100)");
                std::process::exit(if arg == "--help" { 0 } else { 2 });
            }
        }
    }
    (bug, after)
}
