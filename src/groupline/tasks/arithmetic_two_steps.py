"""Templates of the arithmetic task whose answer takes two steps."""

from groupline.tasks.arithmetic_templates import Template

TEMPLATES = (
    Template(
        "oranges_given",
        ("a+b", "p-c"),
        th=(
            "{name}มีส้ม {a} ผล ซื้อเพิ่มอีก {b} ผล แล้วแบ่งให้เพื่อน {c} ผล {name}เหลือส้มกี่ผล",
            "มีส้ม {} ผล",
            "ให้เพื่อนแล้วเหลือ {} ผล",
        ),
        zh=(
            "{name}有 {a} 个橙子，又买了 {b} 个，然后送给朋友 {c} 个。{name}还剩多少个橙子？",
            "橙子有 {} 个",
            "送出后剩 {} 个",
        ),
        en=(
            "{name} has {a} oranges, buys {b} more and gives {c} to a friend. How many oranges are left?",
            "oranges: {}",
            "left after giving: {}",
        ),
    ),
    Template(
        "bus_off_and_on",
        ("a-b", "p+c"),
        th=(
            "รถเมล์คันหนึ่งมีผู้โดยสาร {a} คน ลงที่ป้ายแรก {b} คน แล้วมีคนขึ้นใหม่ {c} คน ตอนนี้มีผู้โดยสารกี่คน",
            "ลงแล้วเหลือ {} คน",
            "ขึ้นใหม่เป็น {} คน",
        ),
        zh=(
            "公共汽车上有 {a} 名乘客，到站时下车 {b} 名，又上车 {c} 名。现在车上有多少名乘客？",
            "下车后剩 {} 名",
            "上车后有 {} 名",
        ),
        en=(
            "A bus carries {a} passengers. At a stop {b} get off and {c} get on. How many are on the bus now?",
            "after getting off: {}",
            "after getting on: {}",
        ),
    ),
    Template(
        "notebooks_change",
        ("m*n", "100-p"),
        th=(
            "สมุดราคาเล่มละ {m} บาท {name}ซื้อ {n} เล่ม จ่ายด้วยธนบัตร 100 บาท ได้รับเงินทอนกี่บาท",
            "ค่าสมุด {} บาท",
            "ได้เงินทอน {} บาท",
        ),
        zh=(
            "一本笔记本 {m} 元，{name}买了 {n} 本，付了 100 元。应该找回多少元？",
            "笔记本共 {} 元",
            "找回 {} 元",
        ),
        en=(
            "A notebook costs {m} dollars. {name} buys {n} and pays with 100 dollars. "
            "How many dollars of change are due?",
            "notebooks cost: {}",
            "change: {}",
        ),
    ),
    Template(
        "pencils_and_case",
        ("m*n", "p+c"),
        th=(
            "ดินสอแท่งละ {m} บาท {name}ซื้อ {n} แท่ง และซื้อกล่องดินสอราคา {c} บาท ต้องจ่ายทั้งหมดกี่บาท",
            "ค่าดินสอ {} บาท",
            "รวมกล่องเป็น {} บาท",
        ),
        zh=(
            "一支铅笔 {m} 元，{name}买了 {n} 支，还买了一个 {c} 元的文具盒。一共要付多少元？",
            "铅笔共 {} 元",
            "加上文具盒是 {} 元",
        ),
        en=(
            "A pencil costs {m} dollars. {name} buys {n} pencils and a case for {c} dollars. How many dollars is that?",
            "pencils cost: {}",
            "with the case: {}",
        ),
    ),
    Template(
        "eggs_broken",
        ("m*n", "p-c"),
        th=(
            "แม่ค้ามีไข่ {m} ถาด ถาดละ {n} ฟอง ทำแตกไป {c} ฟอง เหลือไข่ที่ไม่แตกกี่ฟอง",
            "มีไข่ {} ฟอง",
            "เหลือไข่ {} ฟอง",
        ),
        zh=(
            "店里有 {m} 盘鸡蛋，每盘 {n} 个，打碎了 {c} 个。还剩多少个好鸡蛋？",
            "鸡蛋有 {} 个",
            "还剩 {} 个",
        ),
        en=(
            "A shop has {m} trays of {n} eggs. {c} eggs break. How many whole eggs are left?",
            "eggs in all: {}",
            "whole eggs left: {}",
        ),
    ),
    Template(
        "class_groups",
        ("a+b", "p/c"),
        th=(
            "ห้องเรียนมีนักเรียนชาย {a} คน นักเรียนหญิง {b} คน ครูแบ่งเป็นกลุ่ม กลุ่มละ {c} คน ได้กี่กลุ่ม",
            "มีนักเรียน {} คน",
            "แบ่งได้ {} กลุ่ม",
        ),
        zh=(
            "班里有 {a} 名男生和 {b} 名女生，老师按每组 {c} 人分组。可以分成多少组？",
            "学生有 {} 名",
            "分成 {} 组",
        ),
        en=(
            "A class has {a} boys and {b} girls. The teacher makes groups of {c}. How many groups are there?",
            "pupils: {}",
            "groups: {}",
        ),
    ),
    Template(
        "cookies_left_shared",
        ("a-b", "p/c"),
        th=(
            "มีคุกกี้ {a} ชิ้น {name}กินไป {b} ชิ้น ที่เหลือแบ่งให้เด็ก {c} คน คนละเท่า ๆ กัน เด็กได้คนละกี่ชิ้น",
            "เหลือคุกกี้ {} ชิ้น",
            "ได้คนละ {} ชิ้น",
        ),
        zh=(
            "有 {a} 块饼干，{name}吃了 {b} 块，剩下的平均分给 {c} 个孩子。每个孩子分到多少块？",
            "饼干还剩 {} 块",
            "每人分到 {} 块",
        ),
        en=(
            "There are {a} cookies. {name} eats {b} and shares the rest equally among {c} children. "
            "How many cookies does each child get?",
            "cookies left: {}",
            "cookies each: {}",
        ),
    ),
    Template(
        "zoo_tickets",
        ("m+n", "p*c"),
        th=(
            "ผู้ใหญ่ {m} คน และเด็ก {n} คน ไปเที่ยวสวนสัตว์ ค่าเข้าชมคนละ {c} บาท ต้องจ่ายค่าเข้าทั้งหมดกี่บาท",
            "ไปกัน {} คน",
            "ค่าเข้าทั้งหมด {} บาท",
        ),
        zh=(
            "{m} 个大人和 {n} 个孩子去动物园，门票每人 {c} 元。买门票一共要付多少元？",
            "一共有 {} 人",
            "门票共 {} 元",
        ),
        en=(
            "{m} adults and {n} children visit a zoo. A ticket costs {c} dollars each. How many dollars do they pay?",
            "visitors: {}",
            "dollars for tickets: {}",
        ),
    ),
    Template(
        "library_loans",
        ("a+b", "p-c"),
        th=(
            "ห้องสมุดมีหนังสือนิทาน {a} เล่ม และหนังสือการ์ตูน {b} เล่ม มีคนยืมไป {c} เล่ม เหลือหนังสือกี่เล่ม",
            "มีหนังสือ {} เล่ม",
            "เหลือหนังสือ {} เล่ม",
        ),
        zh=(
            "图书角有 {a} 本故事书和 {b} 本漫画书，借出了 {c} 本。还剩多少本书？",
            "书共有 {} 本",
            "还剩 {} 本",
        ),
        en=(
            "A library shelf has {a} story books and {b} comics. {c} of them are lent out. How many books are left?",
            "books in all: {}",
            "books left: {}",
        ),
    ),
    Template(
        "daily_savings",
        ("m*n", "p+c"),
        th=(
            "{name}ออมเงินวันละ {m} บาท เป็นเวลา {n} วัน แล้วแม่ให้เพิ่มอีก {c} บาท {name}มีเงินทั้งหมดกี่บาท",
            "ออมเงินได้ {} บาท",
            "มีเงินทั้งหมด {} บาท",
        ),
        zh=(
            "{name}每天存 {m} 元，存了 {n} 天，妈妈又给了 {c} 元。{name}一共有多少元？",
            "存了 {} 元",
            "一共有 {} 元",
        ),
        en=(
            "{name} saves {m} dollars a day for {n} days and then gets {c} dollars. How many dollars is that in all?",
            "dollars saved: {}",
            "dollars in all: {}",
        ),
    ),
    Template(
        "flower_vases",
        ("a/b", "p+m"),
        th=(
            "{name}จัดดอกไม้ {a} ดอกใส่แจกัน {b} ใบ ใบละเท่า ๆ กัน แล้วเติมอีกใบละ {m} ดอก แจกันแต่ละใบมีดอกไม้กี่ดอก",
            "ตอนแรกใบละ {} ดอก",
            "เติมแล้วใบละ {} ดอก",
        ),
        zh=(
            "{name}把 {a} 朵花平均插在 {b} 个花瓶里，每个花瓶再加 {m} 朵。现在每个花瓶有多少朵花？",
            "起初每瓶 {} 朵",
            "加花后每瓶 {} 朵",
        ),
        en=(
            "{name} puts {a} flowers equally into {b} vases and then adds {m} to each vase. "
            "How many flowers are in each vase?",
            "flowers in each vase: {}",
            "after adding: {}",
        ),
    ),
    Template(
        "water_packs",
        ("m*n", "p/c"),
        th=(
            "มีน้ำดื่ม {m} แพ็ก แพ็กละ {n} ขวด แบ่งให้คนงาน {c} คน คนละเท่า ๆ กัน คนงานได้น้ำคนละกี่ขวด",
            "มีน้ำทั้งหมด {} ขวด",
            "ได้คนละ {} ขวด",
        ),
        zh=(
            "有 {m} 箱水，每箱 {n} 瓶，平均分给 {c} 名工人。每名工人分到多少瓶水？",
            "水共有 {} 瓶",
            "每人分到 {} 瓶",
        ),
        en=(
            "There are {m} packs of {n} water bottles, shared equally among {c} workers. "
            "How many bottles does each worker get?",
            "bottles in all: {}",
            "bottles each: {}",
        ),
    ),
)
