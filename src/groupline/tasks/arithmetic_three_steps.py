"""Templates of the arithmetic task whose answer takes three steps."""

from groupline.tasks.arithmetic_templates import Template

TEMPLATES = (
    Template(
        "oranges_and_mangoes",
        ("a*b", "c*d", "p+q"),
        th=(
            "ส้มกิโลกรัมละ {a} บาท {name}ซื้อ {b} กิโลกรัม มะม่วงกิโลกรัมละ {c} บาท ซื้อ {d} กิโลกรัม ต้องจ่ายทั้งหมดกี่บาท",
            "ค่าส้ม {} บาท",
            "ค่ามะม่วง {} บาท",
            "รวมเป็น {} บาท",
        ),
        zh=(
            "橙子每公斤 {a} 元，{name}买了 {b} 公斤；芒果每公斤 {c} 元，买了 {d} 公斤。一共要付多少元？",
            "橙子 {} 元",
            "芒果 {} 元",
            "一共 {} 元",
        ),
        en=(
            "Oranges cost {a} dollars a kilogram and {name} buys {b} kilograms. Mangoes cost {c} dollars a kilogram "
            "and {name} buys {d} kilograms. How many dollars is that in all?",
            "oranges cost: {}",
            "mangoes cost: {}",
            "in all: {}",
        ),
    ),
    Template(
        "train_stations",
        ("a+b", "p-c", "q+d"),
        th=(
            "รถไฟมีผู้โดยสาร {a} คน สถานีแรกขึ้น {b} คน สถานีที่สองลง {c} คน และขึ้นอีก {d} คน ตอนนี้มีผู้โดยสารกี่คน",
            "สถานีแรกมี {} คน",
            "ลงแล้วเหลือ {} คน",
            "ขึ้นอีกเป็น {} คน",
        ),
        zh=(
            "火车上有 {a} 名乘客，第一站上车 {b} 名，第二站下车 {c} 名，又上车 {d} 名。现在车上有多少名乘客？",
            "第一站后有 {} 名",
            "下车后剩 {} 名",
            "上车后有 {} 名",
        ),
        en=(
            "A train carries {a} passengers. At the first station {b} get on. "
            "At the second {c} get off and {d} get on. How many passengers are on the train now?",
            "after the first station: {}",
            "after getting off: {}",
            "after getting on: {}",
        ),
    ),
    Template(
        "bread_milk_change",
        ("m*n", "p+c", "200-q"),
        th=(
            "ขนมปังชิ้นละ {m} บาท {name}ซื้อ {n} ชิ้น และซื้อนมอีก {c} บาท จ่ายเงิน 200 บาท ได้รับเงินทอนกี่บาท",
            "ค่าขนมปัง {} บาท",
            "รวมค่านม {} บาท",
            "ได้เงินทอน {} บาท",
        ),
        zh=(
            "一个面包 {m} 元，{name}买了 {n} 个，又买了 {c} 元的牛奶，付了 200 元。应该找回多少元？",
            "面包共 {} 元",
            "加上牛奶是 {} 元",
            "找回 {} 元",
        ),
        en=(
            "A loaf costs {m} dollars. {name} buys {n} loaves and milk for {c} dollars and pays with 200 dollars. "
            "How many dollars of change are due?",
            "loaves cost: {}",
            "with milk: {}",
            "change: {}",
        ),
    ),
    Template(
        "mango_harvest",
        ("a+b", "p-c", "q/d"),
        th=(
            "ชาวสวนเก็บมะม่วงตอนเช้า {a} ผล ตอนบ่าย {b} ผล คัดผลเสียออก {c} ผล ที่เหลือใส่ถุง ถุงละ {d} ผล ได้กี่ถุง",
            "เก็บได้ {} ผล",
            "เหลือผลดี {} ผล",
            "ใส่ได้ {} ถุง",
        ),
        zh=(
            "果农上午摘了 {a} 个芒果，下午摘了 {b} 个，挑出 {c} 个坏的，剩下的每袋装 {d} 个。一共装了多少袋？",
            "摘了 {} 个",
            "好的剩 {} 个",
            "装了 {} 袋",
        ),
        en=(
            "A farmer picks {a} mangoes in the morning and {b} in the afternoon, throws away {c} bad ones "
            "and packs the rest in bags of {d}. How many bags is that?",
            "mangoes picked: {}",
            "good mangoes: {}",
            "bags: {}",
        ),
    ),
    Template(
        "sweets_bags",
        ("m*n", "p-c", "q/d"),
        th=(
            "มีลูกอม {m} ถุง ถุงละ {n} เม็ด {name}กินไป {c} เม็ด ที่เหลือแบ่งให้เด็ก {d} คน คนละเท่า ๆ กัน เด็กได้คนละกี่เม็ด",
            "มีลูกอม {} เม็ด",
            "กินแล้วเหลือ {} เม็ด",
            "ได้คนละ {} เม็ด",
        ),
        zh=(
            "有 {m} 袋糖，每袋 {n} 颗，{name}吃了 {c} 颗，剩下的平均分给 {d} 个孩子。每个孩子分到多少颗？",
            "糖共有 {} 颗",
            "吃后剩 {} 颗",
            "每人分到 {} 颗",
        ),
        en=(
            "There are {m} bags of {n} sweets. {name} eats {c} and shares the rest equally among {d} children. "
            "How many sweets does each child get?",
            "sweets in all: {}",
            "left: {}",
            "sweets each: {}",
        ),
    ),
    Template(
        "unit_price",
        ("a/b", "p*c", "100-q"),
        th=(
            "ปากกา {b} ด้ามราคา {a} บาท {name}ซื้อปากกาแบบเดียวกัน {c} ด้าม จ่ายเงิน 100 บาท ได้รับเงินทอนกี่บาท",
            "ปากการาคาด้ามละ {} บาท",
            "ต้องจ่าย {} บาท",
            "ได้เงินทอน {} บาท",
        ),
        zh=(
            "{b} 支同样的钢笔一共 {a} 元，{name}买了 {c} 支，付了 100 元。应该找回多少元？",
            "钢笔每支 {} 元",
            "要付 {} 元",
            "找回 {} 元",
        ),
        en=(
            "{b} pens cost {a} dollars. {name} buys {c} of the same pens and pays with 100 dollars. "
            "How many dollars of change are due?",
            "one pen costs: {}",
            "to pay: {}",
            "change: {}",
        ),
    ),
    Template(
        "farm_legs",
        ("a*2", "b*4", "p+q"),
        th=(
            "ฟาร์มแห่งหนึ่งมีไก่ {a} ตัว และวัว {b} ตัว ไก่มี 2 ขา วัวมี 4 ขา ไก่และวัวมีขารวมกันกี่ขา",
            "ไก่มีขา {} ขา",
            "วัวมีขา {} ขา",
            "รวมเป็น {} ขา",
        ),
        zh=(
            "农场里有 {a} 只鸡和 {b} 头牛，鸡有 2 条腿，牛有 4 条腿。它们一共有多少条腿？",
            "鸡的腿有 {} 条",
            "牛的腿有 {} 条",
            "一共 {} 条",
        ),
        en=(
            "A farm has {a} chickens and {b} cows. A chicken has 2 legs and a cow has 4. How many legs is that in all?",
            "chicken legs: {}",
            "cow legs: {}",
            "legs in all: {}",
        ),
    ),
    Template(
        "stall_profit",
        ("m*n", "p+c", "q-d"),
        th=(
            "แม่ค้าขายข้าวเหนียว {m} ห่อ ห่อละ {n} บาท ขายน้ำได้อีก {c} บาท ต้นทุนทั้งหมด {d} บาท แม่ค้าได้กำไรกี่บาท",
            "ขายข้าวเหนียวได้ {} บาท",
            "รวมขายได้ {} บาท",
            "ได้กำไร {} บาท",
        ),
        zh=(
            "摊主卖出 {m} 份糯米饭，每份 {n} 元，卖饮料又得 {c} 元，成本一共 {d} 元。摊主赚了多少元？",
            "糯米饭卖了 {} 元",
            "一共卖了 {} 元",
            "赚了 {} 元",
        ),
        en=(
            "A stall sells {m} rice packs at {n} dollars each and drinks for {c} dollars. All costs are {d} dollars. "
            "How many dollars of profit does the stall make?",
            "rice sales: {}",
            "all sales: {}",
            "profit: {}",
        ),
    ),
    Template(
        "hotel_rooms",
        ("m*n", "p-c", "q-d"),
        th=(
            "โรงแรมมี {m} ชั้น ชั้นละ {n} ห้อง ตอนเช้ามีแขกเข้าพัก {c} ห้อง ตอนบ่ายอีก {d} ห้อง เหลือห้องว่างกี่ห้อง",
            "มีห้องทั้งหมด {} ห้อง",
            "ตอนเช้าเหลือ {} ห้อง",
            "ตอนบ่ายเหลือ {} ห้อง",
        ),
        zh=(
            "一家旅馆有 {m} 层，每层 {n} 间房，上午住进 {c} 间，下午又住进 {d} 间。还剩多少间空房？",
            "房间共有 {} 间",
            "上午后剩 {} 间",
            "下午后剩 {} 间",
        ),
        en=(
            "A hotel has {m} floors with {n} rooms each. Guests take {c} rooms in the morning and {d} in the "
            "afternoon. How many rooms are still free?",
            "rooms in all: {}",
            "free after the morning: {}",
            "free after the afternoon: {}",
        ),
    ),
    Template(
        "flowers_then_eggs",
        ("a*b", "c*d", "p-q"),
        th=(
            "{name}ขายดอกไม้ {a} ช่อ ช่อละ {b} บาท แล้วนำเงินไปซื้อไข่ {c} ฟอง ฟองละ {d} บาท {name}เหลือเงินกี่บาท",
            "ขายดอกไม้ได้ {} บาท",
            "ค่าไข่ {} บาท",
            "เหลือเงิน {} บาท",
        ),
        zh=(
            "{name}卖了 {a} 束花，每束 {b} 元，然后用这些钱买了 {c} 个鸡蛋，每个 {d} 元。{name}还剩多少元？",
            "卖花得 {} 元",
            "鸡蛋花了 {} 元",
            "还剩 {} 元",
        ),
        en=(
            "{name} sells {a} bunches of flowers at {b} dollars each and uses the money to buy {c} eggs at {d} dollars "
            "each. How many dollars are left?",
            "flower money: {}",
            "eggs cost: {}",
            "left: {}",
        ),
    ),
    Template(
        "group_paper",
        ("a+b", "p/c", "q*m"),
        th=(
            "ห้องเรียนมีนักเรียนชาย {a} คน นักเรียนหญิง {b} คน แบ่งกลุ่มละ {c} คน แต่ละกลุ่มใช้กระดาษ {m} แผ่น ใช้กระดาษทั้งหมดกี่แผ่น",
            "มีนักเรียน {} คน",
            "แบ่งได้ {} กลุ่ม",
            "ใช้กระดาษ {} แผ่น",
        ),
        zh=(
            "班里有 {a} 名男生和 {b} 名女生，每 {c} 人一组，每组用 {m} 张纸。一共要用多少张纸？",
            "学生有 {} 名",
            "分成 {} 组",
            "用纸 {} 张",
        ),
        en=(
            "A class has {a} boys and {b} girls. They form groups of {c} and each group uses {m} sheets of paper. "
            "How many sheets are used?",
            "pupils: {}",
            "groups: {}",
            "sheets: {}",
        ),
    ),
    Template(
        "cinema_seats",
        ("m*n", "c+d", "p-q"),
        th=(
            "โรงหนังมีที่นั่ง {m} แถว แถวละ {n} ที่ มีผู้ใหญ่เข้าชม {c} คน และเด็ก {d} คน เหลือที่นั่งว่างกี่ที่",
            "มีที่นั่ง {} ที่",
            "มีผู้ชม {} คน",
            "เหลือที่ว่าง {} ที่",
        ),
        zh=(
            "电影院有 {m} 排座位，每排 {n} 个，来了 {c} 个大人和 {d} 个孩子。还剩多少个空座位？",
            "座位有 {} 个",
            "观众有 {} 人",
            "空座位剩 {} 个",
        ),
        en=(
            "A cinema has {m} rows of {n} seats. {c} adults and {d} children sit down. How many seats are still free?",
            "seats: {}",
            "visitors: {}",
            "free seats: {}",
        ),
    ),
)
